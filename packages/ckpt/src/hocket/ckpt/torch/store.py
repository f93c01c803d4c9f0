"""The checkpoints of a run: saved, listed, loaded and deleted under one folder or prefix."""

from __future__ import annotations

import logging
import os
import threading
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hocket.ckpt.datafiles import compression_level
from hocket.ckpt.errors import CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.retention import Policy, Retainer
from hocket.ckpt.torch.background import SaveHandle, close_at_exit, hold_sigterm, release_sigterm
from hocket.ckpt.torch.loading import Loaded, LoadJob
from hocket.ckpt.torch.rendezvous import Rendezvous, open_rendezvous
from hocket.ckpt.torch.saving import SaveJob, new_save_id
from hocket.ckpt.torch.snapshot import Planner, Staging, checked_per_rank, hold_still
from hocket.ckpt.torch.stages import as_peers
from hocket.ckpt.torch.turns import Turns
from hocket.ckpt.values import canonical
from hocket.native import _native

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CheckpointStore", "Entry", "absolute"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What stands under a store's prefix."""

    name: str
    uri: str
    step: int | None
    """None where it is not committed."""
    created: str | None
    """`YYYY-MM-DDTHH:MM:SS.ffffffZ`."""
    status: Literal["committed", "partial", "foreign"]
    """`partial`: a save that never finished. `foreign`: no checkpoint of ours."""


class CheckpointStore:
    """The checkpoints under a folder or an object prefix.

    Build it, save and load on every rank, in the same order; `list` and `delete` may be called on any. Where
    torch.distributed is initialised by then, a small key-value store of its own is opened with it. A save
    uses no process group, and so runs beside the job's collectives. Threads may share a store: their saves
    take turns.

    Args:
        uri: A folder or a prefix (`s3://bucket/run`). Made by the first save.
        timeout_s: How long a rank may be later than the others in a save or a load, before it is given up and
            named. Also how long an exiting process waits for a save under way.
        compression: `"zstd:N"` writes compressed data files, N from 1 to 22.
        retention: Policies (`KeepLast`, `KeepEvery`, `KeepBest`). After each save, once it is committed, rank
            0 deletes the committed checkpoints that none of them keeps; without any, all stay. A failure to
            delete is logged and fails no save.
        staging_bytes: A budget for this rank's staging buffer; a save that needs more is refused. Without
            one, the buffer is as large as what the rank writes.
        unfenced: Save also to a store that ignores conditions, where of two savers under one name both may
            believe that they won: only where nothing else ever writes. Such a store is refused otherwise.

    Attributes:
        uri: As given, as text without a slash at its end; a local path from the root on.

    Example:
        >>> store = CheckpointStore(folder)
        >>> state = {"weight": torch.arange(3.0), "epoch": 1}
        >>> store.save(state, step=7).name
        'step-7'
        >>> store.load("step-7", {"weight": torch.zeros(3), "epoch": 0}).state
        {'weight': tensor([0., 1., 2.]), 'epoch': 1}
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        timeout_s: float = 600,
        compression: str | None = None,
        retention: Policy | Sequence[Policy] = (),
        staging_bytes: int | None = None,
        unfenced: bool = False,
        rendezvous: Rendezvous | None = None,
    ):
        self.uri = absolute(os.fspath(uri).rstrip("/") or "/")
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._level = compression_level(compression)
        self._unfenced = unfenced
        policies = retention if isinstance(retention, Sequence) else (retention,)
        self._retainer = Retainer(self.uri, policies)
        self._rendezvous = rendezvous or open_rendezvous(answer_s=self.timeout_s)
        self._planner = Planner(rank=self._rendezvous.rank, world_size=self._rendezvous.world_size)
        self._staging = Staging(staging_bytes)
        self._turns = Turns(self._rendezvous)
        self._num_saves = 0
        self._num_loads = 0
        self._pid = os.getpid()
        close_at_exit(self)

    @property
    def num_plans(self) -> int:
        """How many plans were made: one for each layout, however many saves."""
        return self._planner.num_plans

    def save(
        self,
        state: object,
        *,
        step: int,
        name: str | None = None,
        per_rank: Mapping[str, object] | None = None,
        per_rank_policy: Literal["reseed", "require", "drop"] = "reseed",
        user: object = None,
        mode: Literal["sync", "async"] = "sync",
        overwrite: bool = False,
        peers: Sequence[int] | DeviceMesh | None = None,
    ) -> SaveHandle:
        """Saves a state tree; collective.

        Synchronous: returns when the checkpoint is committed, and writes from the tensors' own memory.
        Asynchronous: copies this rank's bytes to a staging buffer and returns; the state may change at once.
        The buffer is one per store, as large as what this rank writes, kept and used again: the next save
        waits until it is free. A failure that nobody waited for is raised by the next `save`, once that one
        is under way or done, or by `close`.

        Args:
            state: Nested dicts and lists of tensors, DTensors and plain values, the same on all ranks. A
                plain tensor is taken to be equal on all of them, and written once.
            step: What the listing is ordered by: from 0 to 2^64 - 1.
            name: The checkpoint's name, one path component; `step-<step>` without.
            per_rank: This rank's own values (generators, say), at most 64 KiB.
            per_rank_policy: What a load with another number of ranks does about them: `require` refuses; with
                the others it gets None.
            user: Whatever plain value goes with it; rank 0's is kept.
            mode: `sync` or `async`.
            overwrite: Take the place of a checkpoint of that name. It stays whole until the new one is,
                changes to it in one step, and its files go afterwards.
            peers: Where not all ranks hold the same tree (pipeline stages): the ranks that hold this one, as
                a list or a mesh; given on every rank. The checkpoint holds the union of the trees. What
                several of them have under one name is the same in all: a value, a DTensor on a mesh of all
                its ranks, or a plain tensor of at most 1 MiB.

        Raises:
            CheckpointExistsError: There is a checkpoint of that name; with `overwrite`, one that came while
                this save went on. (Asynchronous: from the handle, as all that another rank can cause.)
            CheckpointUnfencedError: The store cannot keep two savers apart, and `unfenced` was not given.
            CheckpointStateError: The state holds what no checkpoint can hold, or differs between ranks.
            CheckpointTimeoutError: A rank did not report.
            CheckpointError: The save failed on a rank, which is named. Nothing was committed. Or an
                asynchronous save before it failed, which is named: then this one goes on all the same.
            ValueError: An argument of this rank makes no sense. (Asynchronous: from the handle.)
        """
        self._leave_parent()
        with self._turns.one_at_a_time:
            self._num_saves += 1  # before anything can fail: ranks count alike, whatever one was given
            name = name or f"step-{step}"
            job = SaveJob(
                key=f"save-{self._num_saves}",
                uri=self._uri_of(name),
                step=step,
                rendezvous=self._rendezvous,
                timeout_s=self.timeout_s,
                policy=per_rank_policy,
                overwrite=overwrite,
                level=self._level,
                background=mode == "async",
                unfenced=self._unfenced,
            )
            try:
                self._turns.wait(mode, self.timeout_s)
                _check_name(name)
                _check_arguments(step, mode, per_rank_policy)
                job.save_id = new_save_id(self._rendezvous, self._num_saves, job.uri)
                job.per_rank = checked_per_rank(per_rank)
                job.user = canonical(user, "user")
                self._hold_still(job, state, peers)
            except BaseException as error:  # noqa: BLE001 - the other ranks are told, then it is raised
                job.error = error
            if mode == "async":
                hold_sigterm(self)
            handle = self._turns.begin(job, name, self._finish, mode=mode)
            self._turns.raise_unheard(but=handle)  # this one's belongs to who waits for its handle
            return handle

    def _leave_parent(self) -> None:
        """In a forked child: what the parent has under way is the parent's, and its thread is not here."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._turns, self._staging = Turns(self._rendezvous), self._staging.like()

    def _hold_still(self, job: SaveJob, state: object, peers: Sequence[int] | DeviceMesh | None) -> None:
        """Plans the save, and copies this rank's bytes where the state may change before they are written."""
        ranks = as_peers(peers, rank=self._rendezvous.rank, world_size=self._rendezvous.world_size)
        job.snapshot = self._planner.snapshot(state, ranks)
        if job.background or any(info.local.device.type != "cpu" for info in job.snapshot.infos):
            self._turns.take_staging(job)
        job.entries, job.held = hold_still(job.snapshot, self._staging if job.is_staged else None)

    def _finish(self, job: SaveJob) -> None:
        """Writes, commits and then tidies, on the thread that the save has."""
        self._turns.run(job)
        if not self._rendezvous.is_coordinator:
            return
        try:
            self._retainer.after(job.uri.rpartition("/")[2])
        except Exception as error:  # noqa: BLE001 - the checkpoint is there; the next save tries again
            _log.warning("could not delete old checkpoints under `%s`: %s", self.uri, error)

    def load(
        self,
        source: str | os.PathLike[str],
        into: object,
        *,
        strict: bool = True,
        cast: bool = False,
        include: Sequence[str] | None = None,
        check: bool = True,
        read_once: bool = False,
        peers: Sequence[int] | DeviceMesh | None = None,
    ) -> Loaded:
        """Loads a checkpoint into a state tree; collective.

        Tensors and DTensors are filled in place, whatever the number of ranks that saved them. On an error of
        any rank every rank raises, and the tensors' content is undefined, unless the error is a
        `CheckpointIncompatibleError`.

        Args:
            source: A name in this store, or the path or URI of a checkpoint anywhere.
            into: The tree to fill. A part of it without tensors is replaced by what the checkpoint has there;
                an optimizer's node with `slots_like` (name → parameter) becomes its slots, newly made.
            strict: Refuse keys that only one side has; but an empty dict takes whatever values there are, a
                list is replaced as a whole, and a dict without tensors takes values that it has no keys for.
            cast: Convert dtypes that differ, which is refused otherwise.
            include: Globs over names (`model.*`; a node's name stands for all below it): only these are
                loaded. Each matches something.
            check: Verify the digest of each block that is read.
            read_once: Have one rank read each part that several hold (HSDP, DDP, plain tensors) and send it
                to the others over the job's process group: for a store that is slower than the network. All
                ranks then load the same tree.
            peers: Where not all ranks load the same tree (pipeline stages): the ranks that load this one, as
                a list or a mesh; given on every rank. `strict` then means: refuse what no rank takes.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint; a `CheckpointPartialError` where it was
                never finished.
            CheckpointCorruptError: Bytes are not those that were saved; tensor, file and offset are named.
            CheckpointIncompatibleError: Keys, shapes or dtypes differ, and are listed; a glob matches
                nothing; or it is a checkpoint of another format.
            CheckpointStateError: A tensor of the tree cannot be filled: it has no memory, say.
            CheckpointError: The load failed on a rank, which is named.
        """
        self._num_loads += 1
        source = os.fspath(source)
        job = LoadJob(
            key=f"load-{self._num_loads}",
            uri=source.rstrip("/") if "/" in source else self._uri_of(source),
            rendezvous=self._rendezvous,
            timeout_s=self.timeout_s,
            strict=strict,
        )
        try:
            if "/" not in source:
                _check_name(source)
            job.match(into, peers, cast=cast, include=include)
        except BaseException as error:  # noqa: BLE001 - the other ranks are told, then it is raised
            job.error = error
        if peers is not None:
            job.agree_on_match()
        job.fill(check=check, read_once=read_once)
        return job.brought()

    def list(self) -> list[Entry]:
        """What stands under the prefix: the uncommitted first, then by step and creation, the newest last."""
        try:
            found = _native.ckpt_list(self.uri)
        except CheckpointNotFoundError:
            return []
        return [
            Entry(
                name=entry["name"],
                uri=self._uri_of(entry["name"]),
                step=entry["step"],
                created=entry["created"],
                status=entry["status"],
            )
            for entry in found
        ]

    def delete(self, step: int) -> None:
        """Deletes the committed checkpoints of a step. Rank 0 does it; on the other ranks nothing happens.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        if not self._rendezvous.is_coordinator:
            return
        names = [entry.name for entry in self.list() if entry.status == "committed" and entry.step == step]
        if not names:
            raise CheckpointNotFoundError(f"`{self.uri}` has no committed checkpoint of step {step}.")
        for name in names:
            _native.ckpt_delete(self.uri, name)

    def close(self) -> None:
        """Waits for the save under way, with `timeout_s` as its deadline; called at exit and on SIGTERM, too.

        The coordinator then stays a moment for ranks that have not heard the outcome yet.

        Raises:
            CheckpointTimeoutError: The save is still under way.
            CheckpointError: An asynchronous save has failed, and nobody waited for it.
        """
        self._leave_parent()
        in_time = self._turns.stop(self.timeout_s)
        release_sigterm(self)
        self._turns.say_farewell()
        if not in_time:
            raise CheckpointTimeoutError(
                f"A save under `{self.uri}` was still under way after {self.timeout_s:g} s and was given up."
            )
        self._turns.raise_unheard()

    def _uri_of(self, name: str) -> str:
        return f"{self.uri.rstrip('/')}/{name}"


def absolute(uri: str) -> str:
    """A local path from the root on, so that it stays when the process changes its folder; a URI as it is."""
    return uri if "://" in uri else str(Path(uri).absolute())


def _check_name(name: str) -> None:
    is_text = not any(unicodedata.category(char) in ("Cc", "Cs") for char in name)
    if not name or name in (".", "..") or "/" in name or "\\" in name or not is_text:
        raise ValueError(
            f"a checkpoint's name is {name!a}; expected one path component, without control characters"
        )


def _check_arguments(step: int, mode: str, per_rank_policy: str) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**64:
        raise ValueError(f"`step` is {step!r:.80}; expected an integer from 0 to 2^64 - 1")
    if mode not in ("sync", "async"):
        raise ValueError(f"`mode` is {mode!r}; expected 'sync' or 'async'")
    if per_rank_policy not in ("reseed", "require", "drop"):
        raise ValueError(f"`per_rank_policy` is {per_rank_policy!r}; expected 'reseed', 'require' or 'drop'")
