"""The coordinator's part of a save: the check that the ranks' reports agree, and their union.

The files and chunks of a report are packed by the extension, which joins those of all ranks to the manifest
without the interpreter's lock: a save of thousands of ranks has millions of chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointStateError
from hocket.ckpt.torch.ranks.error_propagation import Failure
from hocket.ckpt.torch.saving.plan import MemoryRange, StateSnapshot
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptWritten

__all__ = [
    "RankReport",
    "ReportHead",
    "check_files",
    "describe_difference",
    "explain",
    "leads_of",
    "pack_parts",
    "read_reports",
]

_SHOWN_CHARS = 120
_MOST_BYTES = 8 << 20
"""The most bytes that a value of torch's key-value store has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHead:
    """The part of a report that ranks with the same tree have in common."""

    destination: str = ""
    """The destination, for error messages; the same on all ranks."""
    layout: str = ""
    """Digest of the tensors' names, dtypes, shapes and placements."""
    values: str = ""
    """Digest of the values."""
    peers: tuple[int, ...] | None = None
    """The ranks of this rank's pipeline stage, if not all ranks hold the same tree."""
    failure: Failure | None = None

    @classmethod
    def of(cls, text: bytes) -> ReportHead:
        """Parse the JSON of a report's head."""
        fields: dict[str, Any] = json.loads(text)
        peers = fields.pop("peers")
        return cls(peers=None if peers is None else tuple(peers), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's report of its part of a save."""

    head: ReportHead
    tree: bytes = b""
    """The stage's tree as JSON; sent by the stage's first rank, except by the coordinator."""
    packed: bytes = b""
    """The files, the chunks and the rank's own values, as `ckpt_pack_report` returns them."""

    def is_like(self, other: RankReport) -> bool:
        """Return whether both ranks hold the same tree."""
        return (self.head.layout, self.head.values) == (other.head.layout, other.head.values)

    def to_bytes(self) -> bytes:
        """Return the report as a message: two lines of JSON and the packed rest.

        Raises:
            CheckpointStateError: It is larger than torch's key-value store accepts.
        """
        head = json.dumps(asdict(self.head), separators=(",", ":")).encode()
        message = b"\n".join((head, self.tree, self.packed))
        if len(message) > _MOST_BYTES:
            raise CheckpointStateError(
                f"this rank's report of its files and chunks has {len(message)} bytes; at most {_MOST_BYTES} "
                "pass through the store in which the ranks of a save exchange them. Save from more ranks, so "
                "that each writes less"
            )
        return message


def pack_parts(
    written: CkptWritten | None,
    snapshot: StateSnapshot,
    entries: Sequence[MemoryRange],
    entry_names: Sequence[str],
    per_rank: bytes | None,
) -> bytes:
    """Pack the file that a rank has written, the chunks in it, and the rank's own values."""
    numbers = {info.name: number for number, info in enumerate(snapshot.infos)}
    chunks: list[tuple[str, int | None, Sequence[int], Sequence[int]]] = []
    if written is not None:
        chunks = [
            # A part that belongs to no tensor of the tree holds this rank's own values.
            (name, numbers.get(part.name), part.box.start, part.box.size)
            for name, (part, *_) in zip(entry_names, entries, strict=True)
        ]
    return _native.ckpt_pack_report(written, chunks, None if per_rank is None else per_rank.decode())


def read_reports(messages: Iterable[bytes]) -> list[RankReport]:
    """Return the reports that `to_bytes` encoded; equal heads become one object."""
    heads: dict[bytes, ReportHead] = {}
    reports = []
    for message in messages:
        text, tree, packed = message.split(b"\n", 2)
        head = heads.get(text)
        if head is None:
            head = heads[text] = ReportHead.of(text)
        reports.append(RankReport(head=head, tree=tree, packed=packed))
    return reports


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
    if all(report.head.peers is None for report in reports):
        return [0] * len(reports)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        members.setdefault(report.head.peers or (), []).append(rank)
    for peers, ranks in members.items():
        if list(peers) != ranks:
            raise CheckpointStateError(
                f"`peers` is {list(peers) or None} on the ranks {ranks}. Every rank names all ranks that "
                "hold the tree that it holds, and they name the same"
            )
    return [report.head.peers[0] if report.head.peers else 0 for report in reports]


def check_files(uri: str, files: Sequence[tuple[int, str, int]]) -> None:
    """Check from the coordinator that every rank's files exist with the right size.

    Args:
        uri: The checkpoint.
        files: (rank, path, stored bytes) of each file.

    Raises:
        CheckpointNotFoundError: A file is missing.
        CheckpointError: A file does not have the size that its rank wrote.
    """
    sizes = _native.ckpt_sizes(uri, [path for _, path, _ in files])
    for (rank, path, num_bytes), size in zip(files, sizes, strict=True):
        if size is None:
            raise CheckpointNotFoundError(
                f"`{path}`, which rank {rank} wrote under `{uri}`, cannot be seen from rank 0: this "
                "folder is not shared by all nodes. Save to a shared file system or an object store"
            )
        if size != num_bytes:
            raise CheckpointError(
                f"`{path}` under `{uri}` has {size} bytes as seen from rank 0; rank {rank} wrote "
                f"{num_bytes}. Did another job write here?"
            )
