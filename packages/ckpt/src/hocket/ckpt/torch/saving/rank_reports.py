"""The coordinator's part of a save: the check that the ranks' reports agree, and their union."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.file_names import stored_bytes
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.manifest_builder import build_manifest
from hocket.ckpt.document.records import PerRank, TensorRecord, ValueRecord
from hocket.ckpt.document.values import from_canonical
from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointStateError
from hocket.ckpt.gc_pause import gc_paused
from hocket.ckpt.torch.ranks.error_propagation import Failure
from hocket.ckpt.torch.saving.plan import StateSnapshot
from hocket.ckpt.torch.saving.rank_values import is_rank_values, record_of
from hocket.ckpt.torch.saving.recorded_tree import RecordedTree
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["RankReport", "check_files", "describe_difference", "explain", "leads_of", "union_manifest"]

_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's report of its part of a save."""

    destination: str = ""
    """The destination, for error messages; the same on all ranks."""
    layout: str = ""
    """Digest of the tensors' names, dtypes, shapes and placements."""
    values: str = ""
    """Digest of the values."""
    files: Sequence[CkptFile] = ()
    chunks: Sequence[tuple[str, int, int, int, tuple[int, ...], tuple[int, ...]]] = ()
    """(tensor, index in `files`, offset in that file's data, bytes, start, size) of each chunk."""
    per_rank: str | None = None
    """Canonical JSON."""
    peers: Sequence[int] | None = None
    """The ranks of this rank's pipeline stage, if not all ranks hold the same tree."""
    tree: Mapping[str, Any] | None = None
    """The stage's tree; sent by the stage's first rank, except by the coordinator."""
    failure: Failure | None = None

    def is_like(self, other: RankReport) -> bool:
        """Return whether both ranks hold the same tree."""
        return (self.layout, self.values) == (other.layout, other.values)

    def to_bytes(self) -> bytes:
        """Return the report as JSON."""
        fields = {name: getattr(self, name) for name in RankReport.__slots__}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> RankReport:
        """Return the report that `to_bytes` encoded."""
        return cls(**json.loads(text))


def explain(snapshot: StateSnapshot) -> bytes:
    """Return the data behind a report's digests, name by name; requested only when digests differ."""
    tensors = {
        info.name: f"{info.dtype} {list(info.shape)}, cut {list(info.placing.cuts)} over ranks "
        f"{list(info.placing.ranks)} as {list(info.placing.mesh_shape)}"
        + (f", same as `{info.same_as}`" if info.same_as else "")
        for info in snapshot.infos
    }
    values = {}
    for name, text in snapshot.value_texts.items():
        shown = text.decode()
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}… (XXH3-128 {_native.xxh3_128(text).hex()})"
        values[name] = shown
    return json.dumps({"tensor": tensors, "value": values}, separators=(",", ":")).encode()


def describe_difference(explanations: Mapping[int, bytes], leads: Sequence[int]) -> str:
    """Describe how ranks' states differ from the state of their stage's lead (rank 0 without stages)."""
    states = {rank: json.loads(text) for rank, text in sorted(explanations.items())}
    lines = []
    for rank, state in states.items():
        lead = leads[rank]
        for kind in ("tensor", "value"):
            lead_leaves = states[lead][kind]
            for name in dict.fromkeys((*lead_leaves, *state[kind])):
                lead_value, value = lead_leaves.get(name, "not there"), state[kind].get(name, "not there")
                if lead_value != value:
                    lines.append(f"{kind} `{name}` is {lead_value} on rank {lead} and {value} on rank {rank}")
    if not lines:
        return "the ranks' trees have the same leaves in another order. Build it in one order on all"
    suffix = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return (
        "; ".join(lines[:5])
        + suffix
        + ". State must be the same on all ranks, or on all that `peers` names; what is a rank's own belongs "
        "into `per_rank`"
    )


def leads_of(reports: Sequence[RankReport]) -> list[int]:
    """Return the lead of each rank: the first rank of its stage, or rank 0 without stages.

    Raises:
        CheckpointStateError: Ranks name different members of a stage.
    """
    if all(report.peers is None for report in reports):
        return [0] * len(reports)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        members.setdefault(tuple(report.peers or ()), []).append(rank)
    for peers, ranks in members.items():
        if list(peers) != ranks:
            raise CheckpointStateError(
                f"`peers` is {list(peers) or None} on the ranks {ranks}. Every rank names all ranks that "
                "hold the tree that it holds, and they name the same"
            )
    return [report.peers[0] if report.peers else 0 for report in reports]


def check_files(uri: str, reports: Sequence[RankReport]) -> None:
    """Check from the coordinator that every rank's files exist with the right size.

    Raises:
        CheckpointNotFoundError: A file is missing.
        CheckpointError: A file does not have the size that its rank wrote.
    """
    files = [(rank, file) for rank, report in enumerate(reports) for file in report.files]
    sizes = _native.ckpt_sizes(uri, [file["path"] for _, file in files])
    for (rank, file), size in zip(files, sizes, strict=True):
        if size is None:
            raise CheckpointNotFoundError(
                f"`{file['path']}`, which rank {rank} wrote under `{uri}`, cannot be seen from rank 0: this "
                "folder is not shared by all nodes. Save to a shared file system or an object store"
            )
        if size != stored_bytes(file):
            raise CheckpointError(
                f"`{file['path']}` under `{uri}` has {size} bytes as seen from rank 0; rank {rank} wrote "
                f"{stored_bytes(file)}. Did another job write here?"
            )


@gc_paused()
def union_manifest(
    *,
    save_id: str,
    step: int,
    tree: RecordedTree,
    mesh: Mapping[str, int] | None,
    inlined: Mapping[str, bytes],
    reports: Sequence[RankReport],
    user: object,
    policy: Literal["reseed", "require", "drop"],
) -> Manifest:
    """Build the manifest from the ranks' reports, in rank order; chunks written twice are listed once."""
    files: list[CkptFile] = []
    chunks: dict[str, list[Chunk]] = {}
    rank_records: dict[str, TensorRecord] = {}
    for rank, report in enumerate(reports):
        for name, file, offset, length, start, size in report.chunks:
            if is_rank_values(name):
                rank_records[name] = record_of(name, size[0])
            elif rank not in tree.tensors[name].ranks:
                continue
            chunks.setdefault(name, []).append(
                Chunk(
                    file=len(files) + file, offset=offset, length=length, start=tuple(start), size=tuple(size)
                )
            )
        files.extend(report.files)
    tensors = {
        name: replace(tensor.record, data=inlined[name]) if name in inlined else tensor.record
        for name, tensor in tree.tensors.items()
    } | rank_records
    values = {
        name: ValueRecord(path=path, value=from_canonical(text)) for name, (path, text) in tree.values.items()
    }
    rank_values = [
        None if report.per_rank is None else from_canonical(report.per_rank.encode()) for report in reports
    ]
    return build_manifest(
        writer="hocket.ckpt.torch",
        files=files,
        tensors=tensors,
        chunks=chunks,
        save_id=save_id,
        step=step,
        world_size=len(reports),
        mesh=mesh,
        values=values,
        per_rank=None
        if all(value is None for value in rank_values)
        else PerRank(policy=policy, ranks=tuple(rank_values)),
        user=user,
        integer_keyed=tree.integer_keyed,
    )
