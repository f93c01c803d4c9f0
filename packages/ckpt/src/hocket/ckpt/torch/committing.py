"""The coordinator's part of a save: do the reports fit together, and the one write that is the commit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from hocket.ckpt.datafiles import stored_bytes
from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError
from hocket.ckpt.manifest import Chunk, Manifest, PerRank, ValueRecord
from hocket.ckpt.torch.failures import Failure
from hocket.ckpt.torch.snapshot import Snapshot
from hocket.ckpt.torch.stages import Tree
from hocket.ckpt.values import from_canonical
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["Report", "build_manifest", "check_files", "commit", "describe_difference", "explain"]

_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank says of its part of a save."""

    destination: str = ""
    """What is saved, for people to read; the same on all ranks."""
    layout: str = ""
    """Digest of the tensors' names, dtypes, shapes and placements."""
    values: str = ""
    """Digest of the values."""
    files: Sequence[CkptFile] = ()
    chunks: Sequence[tuple[str, int, int, int, tuple[int, ...], tuple[int, ...]]] = ()
    """Tensor, index in `files`, offset in that file's data, bytes, start, size."""
    per_rank: str | None = None
    """Canonical JSON."""
    peers: Sequence[int] | None = None
    """The ranks of its stage, where not all hold the same tree."""
    tree: Mapping[str, Any] | None = None
    """What its stage holds; told by the stage's first rank, and not by the coordinator."""
    failure: Failure | None = None

    def is_like(self, other: Report) -> bool:
        """Whether both ranks hold the same tree."""
        return (self.layout, self.values) == (other.layout, other.values)

    def to_bytes(self) -> bytes:
        """The report as JSON."""
        fields = {name: getattr(self, name) for name in Report.__slots__}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Report:
        """The report in what `to_bytes` gave."""
        return cls(**json.loads(text))


def explain(snapshot: Snapshot) -> bytes:
    """All that the digests of a report stand for, name by name; asked for only when they differ."""
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
    """Names what differs between a rank's state and its lead's: rank 0's, where there are no stages."""
    told = {rank: json.loads(text) for rank, text in sorted(explanations.items())}
    lines = []
    for rank, theirs in told.items():
        lead = leads[rank]
        for kind in ("tensor", "value"):
            ours = told[lead][kind]
            for name in dict.fromkeys((*ours, *theirs[kind])):
                here, there = ours.get(name, "not there"), theirs[kind].get(name, "not there")
                if here != there:
                    lines.append(f"{kind} `{name}` is {here} on rank {lead} and {there} on rank {rank}")
    if not lines:
        return "the ranks' trees have the same leaves in another order. Build it in one order on all."
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return (
        "; ".join(lines[:5])
        + more
        + ". State must be the same on all ranks, or on all that `peers` names; what is a rank's own belongs "
        "into `per_rank`."
    )


def check_files(uri: str, reports: Sequence[Report]) -> None:
    """Looks for every rank's files from where the coordinator stands.

    Raises:
        CheckpointNotFoundError: A file is not to be seen.
        CheckpointError: One has another size than its rank wrote.
    """
    files = [(rank, file) for rank, report in enumerate(reports) for file in report.files]
    sizes = _native.ckpt_sizes(uri, [file["path"] for _, file in files])
    for (rank, file), size in zip(files, sizes, strict=True):
        if size is None:
            raise CheckpointNotFoundError(
                f"`{file['path']}`, which rank {rank} wrote under `{uri}`, is not there as seen from rank "
                f"0: this "
                "folder is not shared by all nodes. Save to a shared file system or an object store."
            )
        if size != stored_bytes(file):
            raise CheckpointError(
                f"`{file['path']}` under `{uri}` has {size} bytes as seen from rank 0; rank {rank} wrote "
                f"{stored_bytes(file)}. Did another job write here?"
            )


def build_manifest(
    *,
    save_id: str,
    step: int,
    tree: Tree,
    mesh: Mapping[str, int] | None,
    inlined: Mapping[str, bytes],
    reports: Sequence[Report],
    user: object,
    policy: Literal["reseed", "require", "drop"],
) -> Manifest:
    """Puts the ranks' reports together, in rank order. What was written twice is in the manifest once."""
    files: list[CkptFile] = []
    chunks: dict[str, list[Chunk]] = {}
    for rank, report in enumerate(reports):
        for name, file, offset, length, start, size in report.chunks:
            if rank not in tree.tensors[name].ranks:
                continue
            chunks.setdefault(name, []).append(
                Chunk(
                    file=len(files) + file, offset=offset, length=length, start=tuple(start), size=tuple(size)
                )
            )
        files.extend(report.files)
    tensors = {
        name: replace(
            held.record,
            chunks=tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.start)),
            data=inlined.get(name),
        )
        for name, held in tree.tensors.items()
    }
    values = {
        name: ValueRecord(path=path, value=from_canonical(text)) for name, (path, text) in tree.values.items()
    }
    own = [
        None if report.per_rank is None else from_canonical(report.per_rank.encode()) for report in reports
    ]
    return Manifest(
        save_id=save_id,
        step=step,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        version=_native.__version__,
        writer="hocket.ckpt.torch",
        world_size=len(reports),
        mesh=mesh,
        files=tuple(files),
        tensors=tensors,
        values=values,
        per_rank=None if all(value is None for value in own) else PerRank(policy=policy, ranks=tuple(own)),
        user=user,
        integer_keyed=tree.integer_keyed,
    )


def commit(uri: str, manifest: Manifest, replaces: Manifest | None = None, *, unfenced: bool = False) -> None:
    """Writes the manifest, checked once more as a reader would; from here on there is a checkpoint.

    Args:
        uri: The checkpoint.
        manifest: Its manifest.
        replaces: That of the checkpoint whose place it takes, in one step. Its files stay.
        unfenced: Commit also where the store cannot keep two savers apart.

    Raises:
        CheckpointExistsError: Another save was quicker.
        CheckpointUnfencedError: The store cannot keep two savers apart, and `unfenced` is not given.
    """
    _native.ckpt_commit(
        uri,
        _native.ckpt_manifest_encode(manifest.to_document()),
        manifest.save_id,
        unfenced=unfenced,
        replaces=None if replaces is None else replaces.save_id,
    )
