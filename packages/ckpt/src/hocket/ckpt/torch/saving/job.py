"""One save as each rank runs it: write the data file, report, and apply the coordinator's outcome."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from hocket.ckpt.document.file_names import Compression, data_path, entry_name, file_metadata, in_entry_order
from hocket.ckpt.document.manifest import SaveSummary
from hocket.ckpt.document.manifest_builder import commit_over
from hocket.ckpt.document.records import DeltaBase
from hocket.ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointTimeoutError,
)
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import merge, pack_error, unpack_error
from hocket.ckpt.torch.ranks.host_folders import HostFolders
from hocket.ckpt.torch.saving import rank_reports
from hocket.ckpt.torch.saving.joined_manifest import join_stages, union_manifest
from hocket.ckpt.torch.saving.memory_files import MemoryFiles
from hocket.ckpt.torch.saving.plan import MemoryRange, StateSnapshot, part_name
from hocket.ckpt.torch.saving.rank_reports import RankReport, ReportHead
from hocket.ckpt.torch.saving.rank_values import IN_MANIFEST_BYTES, spill
from hocket.ckpt.torch.saving.recorded_tree import RecordedTree
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = ["SaveJob", "new_save_id"]

_log = logging.getLogger(__name__)


def new_save_id(coordinator: Coordinator, number: int, destination: str) -> str:
    """Return the id of a job's `number`-th save: 32 hex digits, equal on all ranks without communication."""
    return _native.xxh3_128(coordinator.nonce + number.to_bytes(8, "little") + destination.encode()).hex()


@dataclass(slots=True, eq=False, kw_only=True)
class SaveJob:
    """A running save on this rank: `write`, then `finish`, both on one thread."""

    key: str
    """Identifies the save among the ranks; the same on all of them."""
    uri: str
    step: int
    coordinator: Coordinator
    timeout_s: float
    policy: Literal["reseed", "require", "drop"]
    overwrite: bool = False
    """Replace the checkpoint that exists when the save begins."""
    save_id: str = ""
    """The id in the names of the data files and in the manifest."""
    compression: Compression | None = None
    """The encoding of compressed data files."""
    delta: DeltaBase | None = None
    """The version that the entries are a difference from, if they are not whole."""
    writer: str = "hocket.ckpt.torch"
    """The writer that the manifest names."""
    background: bool = False
    """Whether the job trains meanwhile; writing then yields to it."""
    unfenced: bool = False
    """Commit even if the store cannot exclude a second writer."""
    user: bytes = b"null"
    """Canonical JSON, as is `per_rank`."""
    per_rank: bytes | None = None
    snapshot: StateSnapshot | None = None
    entries: list[MemoryRange] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    """Tensors that keep the entries' memory alive."""
    entry_names: list[str] = field(default_factory=list)
    """The names of the entries in the data file, once it is written."""
    is_in_memory: bool = False
    """Whether the entries are in a file in memory."""
    is_staged: bool = False
    """Whether the entries are in the store's staging buffer, which the next save waits for."""
    error: BaseException | None = None
    """This rank's error so far; `finish` reports it to the other ranks."""
    written: CkptWritten | None = None
    inlined: dict[str, bytes] = field(default_factory=dict)
    after_commit: Callable[[], None] = lambda: None
    """Called by the coordinator after the commit, before any rank begins another save; must not raise."""
    prepare: Callable[[], None] = lambda: None
    """Called on each rank before it writes; computes the entries' bytes."""
    seal: Callable[[], None] = lambda: None
    """Called by the coordinator after the commit; may fail the save, if it removes the checkpoint."""
    replaces: SaveSummary | None = None
    """The save that the coordinator found at the destination, to be replaced."""
    hosts: HostFolders | None = None
    """The folders of the hosts, if each has one of its own; else all ranks save to one place."""
    memory: MemoryFiles | None = None
    """This rank's data files in memory, if it fills one of them instead of writing a new file."""

    @property
    def destination(self) -> str:
        """The destination as all ranks call it."""
        return self.uri if self.hosts is None else self.name

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.uri.rpartition("/")[2]

    def spill_per_rank(self) -> None:
        """Move this rank's own values to its data file if they are large; after the entries are planned."""
        if self.per_rank is not None and len(self.per_rank) > IN_MANIFEST_BYTES:
            self.per_rank, entry, memory = spill(self.per_rank, self.coordinator.rank)
            shapes = self._shapes | {entry.part.name: entry.part.box.size}
            self.entries = in_entry_order(
                [*self.entries, entry],
                lambda one: (one.dtype, part_name(one.part, shapes[one.part.name])),
            )
            self.held = [*self.held, memory]

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        assert self.snapshot is not None
        return {info.name: info.shape for info in self.snapshot.infos}

    def copy_to_memory(self) -> None:
        """Copy the entries into a file in memory; their own memory belongs to the caller again."""
        assert self.memory is not None
        addresses = self.memory.fill(self._named_entries(), self.save_id)
        self.entries = [
            entry._replace(address=address) for entry, address in zip(self.entries, addresses, strict=True)
        ]
        self.is_in_memory = True
        self.held.clear()

    def _named_entries(self) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        shapes = self._shapes
        self.entry_names = [
            entry_name(name, box.start, is_whole=box.size == shapes.get(name, box.size))
            for name, box in (entry.part for entry in self.entries)
        ]
        return [
            (name, entry.dtype, entry.part.box.size, entry.address, entry.num_bytes)
            for name, entry in zip(self.entry_names, self.entries, strict=True)
        ]

    def write(self) -> None:
        """Write this rank's data file. Afterwards the entries' memory belongs to the caller again."""
        if self.error is None:
            try:
                self._write()
            except BaseException as error:  # noqa: BLE001 - `finish` reports it to the other ranks and raises it
                self.error = error
        if self.hosts is not None:
            try:
                path = None if self.error is not None or self.written is None else self.written["path"]
                self.hosts.mirror(self.key, self.name, path)
            except BaseException as error:  # noqa: BLE001 - as above
                self.error = self.error or error
        self.held.clear()

    def _write(self) -> None:
        assert self.snapshot is not None
        self.prepare()
        self._look_at_destination()
        for entry in self.entries:
            if self.delta is None and entry.part.name in self.snapshot.plan.inlined:
                self.inlined[entry.part.name] = ctypes.string_at(entry.address, entry.num_bytes)
        if not self.entries:
            return
        path = data_path(self.save_id, self.coordinator.rank, is_compressed=self.compression is not None)
        if self.memory is not None:
            if not self.is_in_memory:  # but in a staging buffer, from another device
                self.copy_to_memory()
            self.written = self.memory.publish(self.uri, path)
            return
        self.written = _native.ckpt_write_file(
            self.uri,
            path,
            entries=self._named_entries(),
            metadata=file_metadata(self.save_id),
            compression=self.compression,
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
                f"Nothing was written. Save under another name, delete it first, or pass `overwrite=True`"
            )
        if self.coordinator.is_rank_0 and self.replaces is None:
            self.replaces = SaveSummary.read(self.uri)

    def finish(self) -> None:
        """Report to the coordinator and wait for the outcome.

        Raises:
            CheckpointError: The save failed on this rank, or on the rank that the message names. Nothing was
                committed.
        """
        try:
            if self.coordinator.is_rank_0:
                self._lead()
            else:
                self._follow()
            if self.hosts is not None:
                self.hosts.settle(self.key, self.name, self.save_id)
        except BaseException:
            if self.memory is not None:
                self.memory.give_up()
            raise
        if self.is_in_memory and self.memory is not None:
            self.memory.keep()

    # --- the coordinator ---

    def _lead(self) -> None:
        key, failure, may_remove = "outcome", None, True
        try:
            if self.error is not None:
                raise self.error
            assert self.snapshot is not None
            reports = self._gather()
            failures = [report.head.failure for report in reports]
            failure = merge([each for each in failures if each is not None])
            if failure is not None:
                raise unpack_error(failure, self._what)
            destinations = [report.head.destination for report in reports]
            if len(set(destinations)) > 1:
                listed = "; ".join(
                    f"rank {rank}: {destination}" for rank, destination in enumerate(destinations)
                )
                raise CheckpointStateError(f"the ranks save different checkpoints ({listed:.2000})")
            leads = rank_reports.leads_of(reports)
            if not all(report.is_like(reports[lead]) for report, lead in zip(reports, leads, strict=True)):
                self._post("outcome", {"explain": True})
                key = "verdict"
                raise CheckpointStateError(self._differences(leads))
            packed = _native.CkptReports([report.packed for report in reports])
            if self.hosts is None:
                rank_reports.check_files(self.uri, packed.files())
            manifest = self._union(reports, leads, packed)
            # From here on an error does not imply that nothing was committed: the answer may be lost.
            may_remove = False
            self.replaces = commit_over(
                self.uri, manifest, self.save_id, self.replaces, unfenced=self.unfenced
            )
            self.seal()
        except BaseException as error:
            may_remove = may_remove or isinstance(error, CheckpointExistsError)
            failure = failure or pack_error(error, ranks=[0] if error is self.error else [])
            self._post(key, {"failure": failure, "may_remove": may_remove})
            if may_remove:
                self._remove_files()
            raise
        try:
            self.after_commit()
        finally:
            self._post(key, {})
        if self.replaces is not None:
            self._remove(self.replaces.paths)

    def _gather(self) -> list[RankReport]:
        others = range(1, self.coordinator.world_size)
        texts = self.coordinator.collect(
            f"{self.key}/report", others, timeout_s=self.timeout_s, what=f"its part of `{self.uri}`"
        )
        return [self.report(), *rank_reports.read_reports(texts[rank] for rank in others)]

    def _union(
        self, reports: Sequence[RankReport], leads: Sequence[int], packed: _native.CkptReports
    ) -> bytes:
        assert self.snapshot is not None
        stages = sorted(set(leads))
        joined, values, keyed = join_stages(self.snapshot, {lead: reports[lead].tree for lead in stages})
        numbers = {lead: number for number, lead in enumerate(stages)}
        return union_manifest(
            save_id=self.save_id,
            step=self.step,
            tree=joined,
            tree_of=[numbers[lead] for lead in leads],
            values=values,
            integer_keyed=keyed,
            mesh=self.snapshot.mesh,
            inlined=self.inlined,
            reports=packed,
            user=self.user,
            policy=self.policy,
            writer=self.writer,
            delta=self.delta,
        )

    def _differences(self, leads: Sequence[int]) -> str:
        assert self.snapshot is not None
        others = range(1, self.coordinator.world_size)
        explanations = self.coordinator.collect(
            f"{self.key}/explain", others, timeout_s=self.timeout_s, what="how its state differs"
        )
        return rank_reports.describe_difference(
            {0: rank_reports.explain(self.snapshot), **explanations}, leads
        )

    def _post(self, key: str, outcome: dict[str, Any]) -> None:
        self.coordinator.post(f"{self.key}/{key}", json.dumps(outcome).encode())

    # --- the other ranks ---

    def _follow(self) -> None:
        try:
            report = self.report().to_bytes()
        except BaseException as error:  # noqa: BLE001 - posted instead of the report, then raised
            self.error = error
            report = self.report().to_bytes()
        try:
            self.coordinator.post(f"{self.key}/report/{self.coordinator.rank}", report)
            if self.error is not None:
                self.coordinator.tick(f"{self.key}/seen")  # this rank does not wait for the outcome
            outcome = {} if self.error is not None else self._hear()
        except (CheckpointTimeoutError, RuntimeError) as error:
            # The coordinator is silent or gone; the store says whether it committed.
            if self.error is None and not self._is_committed():
                raise CheckpointError(
                    f"{self._what} has no outcome: rank 0 did not report one ({error})"
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
            explanation = rank_reports.explain(self.snapshot)
            self.coordinator.post(f"{self.key}/explain/{self.coordinator.rank}", explanation)
            outcome = self._receive("verdict")
        self.coordinator.tick(f"{self.key}/seen")
        return outcome

    def _receive(self, key: str) -> dict[str, Any]:
        # Twice, because the coordinator's own wait may begin now, and must end before this one.
        timeout_s = 2 * self.timeout_s
        text = self.coordinator.receive(
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
        return f"the save of `{self.uri}`"

    def report(self) -> RankReport:
        """Return this rank's report to the coordinator."""
        if self.error is not None or self.snapshot is None:
            assert self.error is not None
            failure = pack_error(self.error, ranks=[self.coordinator.rank])
            return RankReport(head=ReportHead(failure=failure))
        peers = self.snapshot.peers
        is_lead = peers is not None and peers[0] == self.coordinator.rank
        packed = rank_reports.pack_parts(
            self.written, self.snapshot, self.entries, self.entry_names, self.per_rank
        )
        return RankReport(
            head=ReportHead(
                destination=f"`{self.destination}` of step {self.step}"
                + (f" as a delta to save `{self.delta.save_id}`" if self.delta else ""),
                layout=self.snapshot.plan.digest,
                values=self.snapshot.values_digest,
                peers=peers,
            ),
            tree=RecordedTree.of(self.snapshot).to_json()
            if is_lead and not self.coordinator.is_rank_0
            else b"",
            packed=packed,
        )

    def _remove_files(self) -> None:
        """Remove the file that this rank wrote, which belongs to no checkpoint."""
        if self.snapshot is None:
            return  # nothing was written, and the destination may be an invalid name
        self._remove([] if self.written is None else [self.written["path"]])

    def _remove(self, paths: Sequence[str]) -> None:
        try:
            _native.ckpt_delete_files(self.uri, paths)
        except Exception as error:  # noqa: BLE001 - an orphan is harmless; the save's outcome counts
            _log.warning("could not remove %s under `%s`: %s", paths, self.uri, error)
