"""The contents of a checkpoint of any format: its files, tensors and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.records import PathItem, PerRank, TensorRecord, ValueRecord
from hocket.ckpt.document.values import decode_value

if TYPE_CHECKING:
    from hocket.native import _native
    from hocket.native._native import CkptFile

__all__ = ["CheckpointContents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContents:
    """The table of contents of a checkpoint of any format; what a format does not record has its default."""

    format: str
    """`hocket`, `dcp`, `torch` or `safetensors`."""
    writer: str
    """The program that wrote a Hocket checkpoint; otherwise the format."""
    save_id: str
    """The id of the save; in other formats, a digest that changes with the tensors, values or sizes."""
    files: tuple[CkptFile, ...] = ()
    """The data files; those of other formats have no digests."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    values: Mapping[str, ValueRecord] = field(default_factory=dict)
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of the mappings with integer keys, which would otherwise be read as lists."""
    step: int = 0
    world_size: int = 1
    mesh: Mapping[str, int] | None = None
    per_rank: PerRank | None = None
    user: Any = None
    root: str = ""
    """The folder or prefix of the files, in formats whose files may lie among others."""
    opaque: Mapping[str, str] = field(default_factory=dict)
    """Entries that have no supported form: name → reason. They are neither read nor converted."""
    items: tuple[tuple[int, int, int, str, str], ...] = ()
    """Zips inside files: file, offset, bytes, `torch` or `zstd`, and the name of the entry."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The `__metadata__` of safetensors files."""

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes; shared storage is counted once."""
        return sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    @property
    def attached(self) -> dict[str, Any]:
        """What was saved beside tensors and values, by a name in parentheses."""
        return {}

    @classmethod
    def of(cls, opened: _native.Checkpoint) -> CheckpointContents:
        """Build the contents of an opened checkpoint of another format; takes them from it."""
        raw = opened.take_contents()
        return CheckpointContents(
            format=raw["format"],
            writer=raw["format"],
            save_id=raw["digest"],
            root=raw["root"],
            files=tuple(
                {"path": path, "size": size, "data_start": 0, "header": "", "digests": ""}
                for path, size in raw["files"]
            ),
            tensors={name: _tensor(tensor) for name, tensor in raw["tensors"].items()},
            values={
                name: ValueRecord(path=tuple(value["path"]), value=decode_value(value["value"]))
                for name, value in raw["values"].items()
            },
            opaque=raw["opaque"],
            items=tuple(map(tuple, raw["items"])),
            metadata=raw.get("metadata", {}),
            integer_keyed=frozenset(tuple(path) for path in raw["integer_keyed"]),
        )


def _tensor(raw: dict[str, Any]) -> TensorRecord:
    return TensorRecord(
        dtype=raw["dtype"],
        shape=tuple(raw["shape"]),
        path=tuple(raw["path"]),
        same_as=raw.get("same_as"),
        chunks=tuple(_chunks(raw["chunks"])),
    )


def _chunks(raw: list[dict[str, Any]]) -> Iterable[Chunk]:
    """Yield the chunks; the extension keeps their strides, and locates those inside zips when it reads."""
    for chunk in raw:
        yield Chunk(
            file=chunk["file"],
            offset=chunk["offset"],
            length=chunk["length"],
            start=tuple(chunk["start"]),
            size=tuple(chunk["size"]),
        )
