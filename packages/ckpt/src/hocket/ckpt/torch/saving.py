"""One save, as each rank runs it: write, report, and end as the coordinator says."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from hocket.ckpt.datafiles import data_path, file_metadata
from hocket.ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointTimeoutError,
)
from hocket.ckpt.manifest import Manifest
from hocket.ckpt.torch import committing
from hocket.ckpt.torch.committing import Report
from hocket.ckpt.torch.failures import merge, pack_error, unpack_error
from hocket.ckpt.torch.rendezvous import Rendezvous
from hocket.ckpt.torch.snapshot import Entry, Snapshot, part_name
from hocket.ckpt.torch.stages import Tree, leads_of, merge_trees
from hocket.ckpt.values import from_canonical
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = ["SaveJob", "new_save_id"]

_log = logging.getLogger(__name__)


def new_save_id(rendezvous: Rendezvous, number: int, destination: str) -> str:
    """The id of a job's `number`-th save: alike on all ranks, with nothing exchanged; 32 hex digits."""
    return _native.xxh3_128(rendezvous.nonce + number.to_bytes(8, "little") + destination.encode()).hex()


@dataclass(slots=True, eq=False, kw_only=True)
class SaveJob:
    """A save under way on this rank: `write`, then `settle`, both on one thread."""

    key: str
    """Names the save among the ranks; the same on all of them."""
    uri: str
    step: int
    rendezvous: Rendezvous
    timeout_s: float
    policy: Literal["reseed", "require", "drop"]
    overwrite: bool = False
    """Take the place of the checkpoint that is there when the save begins."""
    save_id: str = ""
    """Of the files and the manifest."""
    level: int | None = None
    """zstd's, for compressed data files."""
    background: bool = False
    """The job trains meanwhile: writing gives way to it."""
    unfenced: bool = False
    """Commit also where the store cannot keep two savers apart."""
    user: bytes = b"null"
    """Canonical JSON, as is `per_rank`."""
    per_rank: bytes | None = None
    snapshot: Snapshot | None = None
    entries: list[Entry] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    """What keeps the entries' memory alive."""
    is_staged: bool = False
    """Whether that is the store's staging buffer, which the next save waits for."""
    error: BaseException | None = None
    """What went wrong on this rank so far; the other ranks are told by `settle`."""
    written: CkptWritten | None = None
    inlined: dict[str, bytes] = field(default_factory=dict)
    replaces: Manifest | None = None
    """What the coordinator found at the destination, to be replaced."""

    def write(self) -> None:
        """Writes this rank's data file. Afterwards the entries' memory is the caller's again."""
        if self.error is None:
            try:
                self._write()
            except BaseException as error:  # noqa: BLE001 - `settle` tells the other ranks and raises it
                self.error = error
        self.held.clear()

    def _write(self) -> None:
        assert self.snapshot is not None
        self._look_at_destination()
        shapes = {info.name: info.shape for info in self.snapshot.infos}
        for entry in self.entries:
            if entry.part.name in self.snapshot.plan.inlined:
                self.inlined[entry.part.name] = ctypes.string_at(entry.address, entry.num_bytes)
        if self.entries:
            self.written = _native.ckpt_write_file(
                self.uri,
                data_path(self.save_id, self.rendezvous.rank, level=self.level),
                entries=[
                    (
                        part_name(entry.part, shapes[entry.part.name]),
                        entry.dtype,
                        entry.part.box.size,
                        entry.address,
                        entry.num_bytes,
                    )
                    for entry in self.entries
                ],
                metadata=file_metadata(self.save_id),
                level=self.level,
                background=self.background,
            )

    def _look_at_destination(self) -> None:
        try:
            head = json.loads(_native.ckpt_manifest_head(self.uri))
        except CheckpointNotFoundError:
            return
        if not self.overwrite:
            raise CheckpointExistsError(
                f"`{self.uri}` holds a checkpoint already, of step {head['step']}, saved {head['created']}. "
                f"Nothing was written. Save under another name, delete it first, or pass `overwrite=True`."
            )
        if self.rendezvous.is_coordinator:
            self.replaces = Manifest.from_document(_native.ckpt_manifest_read(self.uri))

    def settle(self) -> None:
        """Reports, and waits for the outcome.

        Raises:
            CheckpointError: The save failed, here or on the rank that is named; there is no new checkpoint.
        """
        if self.rendezvous.is_coordinator:
            self._lead()
        else:
            self._follow()

    # --- the coordinator ---

    def _lead(self) -> None:
        key, failure, may_remove = "outcome", None, True
        try:
            if self.error is not None:
                raise self.error
            assert self.snapshot is not None
            reports = self._gather()
            failure = merge([report.failure for report in reports if report.failure is not None])
            if failure is not None:
                raise unpack_error(failure, self._what)
            destinations = [report.destination for report in reports]
            if len(set(destinations)) > 1:
                told = "; ".join(f"rank {rank}: {where}" for rank, where in enumerate(destinations))
                raise CheckpointStateError(f"the ranks save different checkpoints ({told:.2000}).")
            leads = leads_of(reports)
            if not all(report.is_like(reports[lead]) for report, lead in zip(reports, leads, strict=True)):
                self._post("outcome", {"explain": True})
                key = "verdict"
                raise CheckpointStateError(self._differences(leads))
            committing.check_files(self.uri, reports)
            manifest = committing.build_manifest(
                save_id=self.save_id,
                step=self.step,
                tree=self._union(reports, leads),
                mesh=self.snapshot.mesh,
                inlined=self.inlined,
                reports=reports,
                user=from_canonical(self.user),
                policy=self.policy,
            )
            # From here on an error need not mean that nothing was committed: it may be the answer that was
            # lost.
            may_remove = False
            committing.commit(self.uri, manifest, self.replaces, unfenced=self.unfenced)
        except BaseException as error:
            may_remove = may_remove or isinstance(error, CheckpointExistsError)
            failure = failure or pack_error(error, ranks=[0] if error is self.error else [])
            self._post(key, {"failure": failure, "may_remove": may_remove})
            if may_remove:
                self._remove_files()
            raise
        self._post(key, {})
        if self.replaces is not None:
            self._remove([file["path"] for file in self.replaces.files])

    def _gather(self) -> list[Report]:
        others = range(1, self.rendezvous.world_size)
        found = self.rendezvous.collect(
            f"{self.key}/report", others, timeout_s=self.timeout_s, what=f"its part of `{self.uri}`"
        )
        return [self.report(), *(Report.from_bytes(found[rank]) for rank in others)]

    def _union(self, reports: Sequence[Report], leads: Sequence[int]) -> Tree:
        assert self.snapshot is not None
        others = sorted({*leads} - {0})
        told = {lead: reports[lead].tree for lead in others}
        return merge_trees(
            {0: Tree.of(self.snapshot), **{lead: Tree.from_json(tree) for lead, tree in told.items() if tree}}
        )

    def _differences(self, leads: Sequence[int]) -> str:
        assert self.snapshot is not None
        others = range(1, self.rendezvous.world_size)
        found = self.rendezvous.collect(
            f"{self.key}/explain", others, timeout_s=self.timeout_s, what="how its state differs"
        )
        return committing.describe_difference({0: committing.explain(self.snapshot), **found}, leads)

    def _post(self, key: str, outcome: dict[str, Any]) -> None:
        self.rendezvous.post(f"{self.key}/{key}", json.dumps(outcome).encode())

    # --- the other ranks ---

    def _follow(self) -> None:
        try:
            report = self.report().to_bytes()
        except BaseException as error:  # noqa: BLE001 - told instead of the report, then raised
            self.error = error
            report = self.report().to_bytes()
        try:
            self.rendezvous.post(f"{self.key}/report/{self.rendezvous.rank}", report)
            if self.error is not None:
                self.rendezvous.tick(f"{self.key}/seen")  # nothing to hear: nobody need wait for us
            outcome = {} if self.error is not None else self._hear()
        except (CheckpointTimeoutError, RuntimeError) as error:
            # The coordinator is silent or gone; whether it came to the commit stands in the store.
            if self.error is None and not self._is_committed():
                raise CheckpointError(
                    f"{self._what} has no outcome: rank 0 did not tell one ({error})."
                ) from error
            outcome = {}
        if self.error is not None:
            self._remove_files()
            raise self.error
        if "failure" in outcome:
            if outcome["may_remove"]:
                self._remove_files()
            raise unpack_error(outcome["failure"], self._what)

    def _hear(self) -> dict[str, Any]:
        outcome = self._receive("outcome")
        if outcome.get("explain"):
            assert self.snapshot is not None
            explanation = committing.explain(self.snapshot)
            self.rendezvous.post(f"{self.key}/explain/{self.rendezvous.rank}", explanation)
            outcome = self._receive("verdict")
        self.rendezvous.tick(f"{self.key}/seen")
        return outcome

    def _receive(self, key: str) -> dict[str, Any]:
        # Twice: the coordinator's own wait may begin when ours does, and ends before ours.
        timeout_s = 2 * self.timeout_s
        text = self.rendezvous.receive(
            f"{self.key}/{key}", timeout_s=timeout_s, what=f"what became of `{self.uri}`"
        )
        outcome: dict[str, Any] = json.loads(text)
        return outcome

    def _is_committed(self) -> bool:
        try:
            return bool(json.loads(_native.ckpt_manifest_head(self.uri))["save_id"] == self.save_id)
        except CheckpointError:
            return False

    # --- both ---

    @property
    def _what(self) -> str:
        return f"The save of `{self.uri}`"

    def report(self) -> Report:
        """What this rank tells the coordinator."""
        if self.error is not None or self.snapshot is None:
            assert self.error is not None
            return Report(failure=pack_error(self.error, ranks=[self.rendezvous.rank]))
        peers = self.snapshot.peers
        is_lead = peers is not None and peers[0] == self.rendezvous.rank
        files, chunks = [], []
        if self.written is not None:
            shapes = {info.name: info.shape for info in self.snapshot.infos}
            lies = self.written["entries"]
            files = [{key: value for key, value in self.written.items() if key != "entries"}]
            for entry in self.entries:
                offset, length = lies[part_name(entry.part, shapes[entry.part.name])]
                chunks.append((entry.part.name, 0, offset, length, entry.part.box.start, entry.part.box.size))
        return Report(
            destination=f"`{self.uri}` of step {self.step}",
            layout=self.snapshot.plan.digest,
            values=self.snapshot.values_digest,
            files=files,  # type: ignore[arg-type]
            chunks=chunks,
            per_rank=None if self.per_rank is None else self.per_rank.decode(),
            peers=peers,
            tree=Tree.of(self.snapshot).to_json() if is_lead and not self.rendezvous.is_coordinator else None,
        )

    def _remove_files(self) -> None:
        """Takes back what this rank wrote: it is no part of any checkpoint."""
        if self.snapshot is None:
            return  # nothing was, and the destination may be no good name
        self._remove([] if self.written is None else [self.written["path"]])

    def _remove(self, paths: list[str]) -> None:
        try:
            _native.ckpt_delete_files(self.uri, paths)
        except Exception as error:  # noqa: BLE001 - an orphan is harmless, and the save's own end is what counts
            _log.warning("could not remove %s under `%s`: %s", paths, self.uri, error)
