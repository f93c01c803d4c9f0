"""The catalogue: the table of contents of a foreign checkpoint, in place of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.ckpt.document.chunks import ForeignChunk
from hocket.ckpt.document.manifest import PathItem, TensorRecord, ValueRecord, decode_value

if TYPE_CHECKING:
    from hocket.native import _native
    from hocket.native._native import CkptFile

__all__ = ["Catalogue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The table of contents of a foreign checkpoint."""

    format: str
    """`dcp`, `torch` or `safetensors`."""
    root: str
    """The folder or prefix of the files."""
    files: tuple[CkptFile, ...]
    """The files as in a manifest, but without digests, which these formats lack."""
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    opaque: Mapping[str, str] = field(default_factory=dict)
    """Entries that have no supported form: name → reason. They are neither read nor converted."""
    items: tuple[tuple[int, int, int, str, str], ...] = ()
    """Zips inside files: file, offset, bytes, `torch` or `zstd`, and the name of the entry."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The `__metadata__` of safetensors files."""
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of mappings with integer keys, which would otherwise be read as lists."""
    digest: str = ""
    """Hexadecimal XXH3-128 of the catalogue's document; changes with the tensors, values or sizes."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes; shared storage is counted once."""
        return sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    @classmethod
    def of(cls, opened: _native.Checkpoint) -> Catalogue:
        """Build the catalogue of an opened checkpoint of another format."""
        raw = opened.take_contents()
        return cls(
            format=raw["format"],
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
            digest=raw["digest"],
        )


def _tensor(raw: dict[str, Any]) -> TensorRecord:
    return TensorRecord(
        dtype=raw["dtype"],
        shape=tuple(raw["shape"]),
        path=tuple(raw["path"]),
        same_as=raw.get("same_as"),
        chunks=tuple(_chunks(raw["chunks"])),
    )


def _chunks(raw: list[dict[str, Any]]) -> Iterable[ForeignChunk]:
    for chunk in raw:
        strides = chunk.get("strides")
        yield ForeignChunk(
            file=chunk["file"],
            offset=chunk["offset"],
            length=chunk["length"],
            start=tuple(chunk["start"]),
            size=tuple(chunk["size"]),
            strides=None if strides is None else tuple(strides),
            wrapped=chunk.get("wrapped"),
        )
