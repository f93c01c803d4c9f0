"""A store of checkpoints: save, list, load and delete under one folder or object prefix."""

from __future__ import annotations

import logging
import os
import threading
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from hocket.ckpt.document.file_names import parse_compression
from hocket.ckpt.document.values import canonical
from hocket.ckpt.errors import CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.torch.loading.foreign_weights import ForeignWeights, open_foreign_weights
from hocket.ckpt.torch.loading.job import Loaded, LoadJob
from hocket.ckpt.torch.ranks.coordinator import Coordinator, open_coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree
from hocket.ckpt.torch.ranks.host_folders import HostFolders
from hocket.ckpt.torch.ranks.pipeline import as_peers
from hocket.ckpt.torch.saving.async_save import SaveHandle, close_at_exit, hold_sigterm, release_sigterm
from hocket.ckpt.torch.saving.job import SaveJob, new_save_id
from hocket.ckpt.torch.saving.plan import SavePlanner, StagingBuffer, checked_per_rank, stage
from hocket.ckpt.torch.saving.queue import SaveQueue, ThinQueue
from hocket.ckpt.torch.saving.write_check import check_place
from hocket.ckpt.uris import absolute, child_uri, local_path
from hocket.ckpt.verbs.list import ListedCheckpoint, list_checkpoints
from hocket.ckpt.verbs.retention import CheckpointRetainer, RetentionPolicy
from hocket.native import _native

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CheckpointStore"]

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints under a folder or an object prefix.

    Construct it, save and load on every rank, in the same order; `list` and `delete` may be called on any
    rank. If torch.distributed is initialised, the constructor opens a small key-value store for the ranks. A
    save uses no process group, so it runs beside the job's collectives. Threads may share a store: their
    saves run one at a time.

    Args:
        uri: A folder or a prefix (`s3://bucket/run`). Created by the first save.
        timeout_s: Seconds that a rank may be later than the others in a save or a load before an error names
            it; also the maximum wait for a running save when the process exits.
        compression: `"zstd:N"` writes compressed data files, N from 1 to 22; `"planes+zstd:N"` makes those of
            floating dtypes smaller.
        retention: Policies (`KeepLast`, `KeepEvery`, `KeepBest`). After each commit, rank 0 deletes the
            committed checkpoints that no policy keeps, and the other ranks' saves end after that; without
            policies, all are kept. A failure to delete is logged and does not fail the save. A `Thin` drops
            the optimizer state of older ones, on a thread of rank 0 that no save waits for.
        staging_bytes: Size limit of this rank's staging buffer; a save that needs more is refused. If None,
            the buffer has the size of the data that the rank writes.
        unfenced: Also save to a store that ignores or rejects conditional writes. Two jobs that save under
            one name may then both report success, so set it only if there is no other writer. Such a store is
            refused otherwise.

    Attributes:
        uri: The given location as text, without a trailing slash; for a local path or a `file://` URI, the
            absolute path.

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
        retention: RetentionPolicy | Sequence[RetentionPolicy] = (),
        staging_bytes: int | None = None,
        unfenced: bool = False,
        coordinator: Coordinator | None = None,
    ):
        self.uri = absolute(uri)
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._compression = parse_compression(compression)
        self._unfenced = unfenced
        policies = retention if isinstance(retention, Sequence) else (retention,)
        self._retainer = CheckpointRetainer(self.uri, policies, unfenced=unfenced) if policies else None
        self._thin_queue = ThinQueue(self._retainer)
        self._coordinator = coordinator or open_coordinator(answer_s=self.timeout_s)
        self._planner = SavePlanner(rank=self._coordinator.rank, world_size=self._coordinator.world_size)
        self._staging = StagingBuffer(staging_bytes)
        self._save_queue = SaveQueue(self._coordinator)
        self._hosts: HostFolders | None = None
        self._num_saves = self._num_loads = self._num_checks = 0
        self._pid = os.getpid()
        close_at_exit(self)

    def __repr__(self) -> str:
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        return f"<CheckpointStore {self.uri!r}: rank {rank} of {world_size}>"

    @property
    def num_plans(self) -> int:
        """The number of plans made; saves with the same layout share one plan."""
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
        """Save a state tree; collective.

        A synchronous save writes from the tensors' own memory and returns when the checkpoint is committed.
        An asynchronous save copies this rank's bytes to a staging buffer and returns; the state may change at
        once. A store has one staging buffer, as large as what this rank writes, and reuses it: the next save
        waits until it is free. An error that no `wait` has raised is raised by the next `save`, after that
        save has started, or by `close`.

        Args:
            state: Nested dicts and lists of tensors, DTensors and plain values, the same on all ranks. A
                plain tensor is assumed to be equal on all ranks and is written once.
            step: The step that listings are sorted by: from 0 to 2^64 - 1.
            name: The checkpoint's name, one path component; `step-<step>` if None.
            per_rank: This rank's own values (such as random number generators). Beyond 64 KiB they are stored
                in the rank's data file instead of the manifest.
            per_rank_policy: The behaviour of a load with another world size: `require` raises, the others
                return None.
            user: A plain value to store with the checkpoint; rank 0's value is used.
            mode: `sync` or `async`.
            overwrite: Replace an existing checkpoint of that name. It stays readable until the new one
                atomically replaces it; its files are removed afterwards.
            peers: If ranks hold different trees (pipeline stages): the ranks that hold this one, as a list or
                a mesh; required on every rank then. The checkpoint holds the union of the trees. A name that
                several of them have must mean the same object: equal values, a DTensor on a mesh of all its
                ranks, or a plain tensor of at most 1 MiB.

        Raises:
            CheckpointExistsError: A checkpoint of that name exists; with `overwrite`, another save committed
                one during this save. (Asynchronous: raised by the handle, as are all errors that another rank
                can cause.)
            CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
            CheckpointStateError: The state cannot be saved, or differs between ranks.
            CheckpointTimeoutError: A rank did not report in time.
            CheckpointError: The save failed on the rank that the message names, and nothing was committed. Or
                an earlier asynchronous save failed, which the message names; this save then runs
                nevertheless.
            ValueError: An argument of this rank is invalid. (Asynchronous: raised by the handle.)
        """
        self._leave_parent()
        with self._save_queue.one_at_a_time:
            self._num_saves += 1  # before anything can fail, so that all ranks have the same count
            name = name or f"step-{step}"
            job = SaveJob(
                key=f"save-{self._num_saves}",
                uri=self._uri_of(name),
                step=step,
                coordinator=self._coordinator,
                timeout_s=self.timeout_s,
                policy=per_rank_policy,
                overwrite=overwrite,
                compression=self._compression,
                background=mode == "async",
                unfenced=self._unfenced,
                after_commit=partial(self._retain, name),
                hosts=self._hosts,
            )
            try:
                self._save_queue.wait(mode, self.timeout_s)
                _check_name(name)
                _check_arguments(step, mode, per_rank_policy)
                job.save_id = new_save_id(self._coordinator, self._num_saves, job.destination)
                job.per_rank = checked_per_rank(per_rank)
                job.user = canonical(user, "user")
                self._stage(job, state, peers)
            except BaseException as error:  # noqa: BLE001 - reported to the other ranks, then raised
                job.error = error
            if mode == "async":
                hold_sigterm(self)
            handle = self._save_queue.begin(job, name, mode=mode)
            self._save_queue.raise_unheard(but=handle)  # the caller gets this save's error from its handle
            return handle

    def _leave_parent(self) -> None:
        """Reset the store in a forked child: running saves and their thread stay with the parent."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._save_queue, self._staging = SaveQueue(self._coordinator), self._staging.like()
        self._thin_queue = ThinQueue(self._retainer)

    def _stage(self, job: SaveJob, state: object, peers: Sequence[int] | DeviceMesh | None) -> None:
        """Plan the save and copy this rank's bytes, if the state may change before they are written."""
        ranks = as_peers(peers, rank=self._coordinator.rank, world_size=self._coordinator.world_size)
        job.snapshot = self._planner.snapshot(state, ranks)
        is_on_device = any(info.local.device.type != "cpu" for info in job.snapshot.infos)
        if is_on_device or (job.background and job.memory is None):
            self._save_queue.take_staging(job)
        job.entries, job.held = stage(job.snapshot, self._staging if job.is_staged else None)
        job.spill_per_rank()
        if job.memory is not None and not is_on_device and job.entries:
            job.copy_to_memory()

    def _retain(self, name: str) -> None:
        """Apply retention after the commit of `name`; runs on rank 0, on the save's thread.

        No rank writes meanwhile: each runs its saves in order, and does not know this one's outcome yet.
        """
        if self._retainer is None:
            return
        try:
            self._retainer.after(name, saving=self._save_queue.names)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed; the next save tries again
            _log.warning("could not delete old checkpoints under `%s`: %s", self.uri, error)
        self._thin_queue.add(name, lambda: self._save_queue.names)

    def load(
        self,
        source: str | os.PathLike[str],
        into: object,
        *,
        strict: bool = True,
        cast: bool = False,
        include: Sequence[str] | None = None,
        ignore: Sequence[str] | None = None,
        check: bool = True,
        read_once: bool = False,
        peers: Sequence[int] | DeviceMesh | None = None,
    ) -> Loaded:
        """Load a checkpoint into a state tree; collective.

        Tensors and DTensors are loaded in place, whatever the number of ranks that saved them. On an error of
        any rank every rank raises, and the tensors' contents are undefined, unless the error is a
        `CheckpointIncompatibleError`.

        Args:
            source: A name in this store, or the path or URI of any checkpoint.
            into: The tree to load into. A subtree without tensors is replaced by the checkpoint's; an
                optimizer node with `slots_like` (name → parameter) is replaced by newly created slots.
            strict: Refuse keys that only one side has. Exceptions: an empty dict receives all values at its
                path, a list is replaced as a whole, and a dict without tensors receives values that it has no
                keys for.
            cast: Convert between dtypes instead of refusing a difference.
            include: Globs over names (`model.*`; a node's name includes all names below it): only these are
                loaded. Each glob must match something.
            ignore: Globs over names that the checkpoint may have beyond the tree, in a strict load.
            check: Verify the digest of each block that is read.
            read_once: Read each replicated part (HSDP, DDP, plain tensors) on one rank and send it to the
                others over the job's process group, for stores that are slower than the network. All ranks
                must load the same tree.
            peers: If ranks load different trees (pipeline stages): the ranks that load this one, as a list or
                a mesh; required on every rank then. `strict` then refuses names that no rank loads.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint; a `CheckpointPartialError` if its save never
                finished.
            CheckpointCorruptError: A block does not match its digest; the message names tensor, file and
                offset.
            CheckpointIncompatibleError: Keys, shapes or dtypes differ (the message lists them), a glob
                matches nothing, or the checkpoint has another format.
            CheckpointStateError: A tensor of the tree cannot be loaded into, for example without memory.
            CheckpointError: The load failed on the rank that the message names.
        """
        self._num_loads += 1
        source = local_path(source)
        job = LoadJob(
            key=f"load-{self._num_loads}",
            uri=source.rstrip("/") if "/" in source else self._uri_of(source),
            coordinator=self._coordinator,
            timeout_s=self.timeout_s,
            strict=strict,
            hosts=self._hosts,
        )
        try:
            if "/" not in source:
                _check_name(source)
            job.match(into, peers, cast=cast, include=include, ignore=ignore)
        except BaseException as error:  # noqa: BLE001 - reported to the other ranks, then raised
            job.error = error
        return job.finish(is_part=peers is not None, check=check, read_once=read_once)

    def foreign_weights(self, source: str | os.PathLike[str]) -> ForeignWeights | None:
        """Open a checkpoint of another program; None for a checkpoint of Hocket. Not collective.

        Args:
            source: A name in this store, or a path or URI: a distributed checkpoint of torch, a file of
                `torch.save`, or safetensors.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of a known format.
            CheckpointUnsafeError: A pickle in it refers to anything but data.
        """
        source = local_path(source)
        return open_foreign_weights(source if "/" in source else self._uri_of(source))

    def list(self) -> list[ListedCheckpoint]:
        """List the children of the prefix: uncommitted ones first, then by step and creation time."""
        try:
            return list_checkpoints(self.uri)
        except CheckpointNotFoundError:
            return []

    def delete(self, step: int) -> None:
        """Delete the committed checkpoints of a step on rank 0; do nothing on the other ranks.

        Raises:
            CheckpointNotFoundError: There is no committed checkpoint of that step.
        """
        if not self._coordinator.is_rank_0:
            return
        names = [entry.name for entry in self.list() if entry.status == "committed" and entry.step == step]
        if not names:
            raise CheckpointNotFoundError(f"`{self.uri}` has no committed checkpoint of step {step}")
        for name in names:
            _native.ckpt_delete(self.uri, name)

    def check_writable(self) -> None:
        """Raise on every rank if checkpoints cannot be saved here, before a training would lose its work.

        Collective. A local folder is created. In an object store, rank 0 writes an object and removes it.

        Raises:
            CheckpointUnwritableError: The local folder cannot be created or written to on a rank.
            CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
            StoreError: The store cannot be reached or written to; on ranks other than 0, CheckpointError.
        """
        self._num_checks += 1
        caught = None
        try:
            check_place(self.uri, is_rank_0=self._coordinator.is_rank_0, unfenced=self._unfenced)
        except BaseException as error:  # noqa: BLE001 - reported to the other ranks, then raised
            caught = error
        agree(
            self._coordinator,
            f"writable-{self._num_checks}",
            caught,
            timeout_s=self.timeout_s,
            what=f"preparation of `{self.uri}`",
        )

    def close(self) -> None:
        """Wait for the running save, at most `timeout_s`; also called at exit and on SIGTERM."""
        self._leave_parent()
        is_stopped = self._save_queue.stop(self.timeout_s)
        self._thin_queue.stop(self.timeout_s)
        release_sigterm(self)
        self._save_queue.say_farewell()
        if not is_stopped:
            raise CheckpointTimeoutError(
                f"a save under `{self.uri}` was still under way after {self.timeout_s:g} s and was given up"
            )
        self._save_queue.raise_unheard()

    def _uri_of(self, name: str) -> str:
        return child_uri(self.uri, name)


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
