"""What a checkpoint of another format holds: the table of contents that stands in for a manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hocket.ckpt.manifest import Chunk, PathItem, TensorRecord, ValueRecord, decode_value
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["FORMATS", "Catalogue", "ForeignChunk"]

FORMATS: Mapping[str, str] = {
    "dcp": "distributed checkpoint of torch",
    "torch": "file of torch.save",
    "safetensors": "safetensors",
}
"""What each foreign format is called to people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignChunk(Chunk):
    """A box of a tensor in somebody else's file; its offset counts from the beginning of the file."""

    strides: tuple[int, ...] | None = None
    """In items; None where it lies in C order."""
    wrapped: Literal["torch", "zstd"] | None = None
    """Offset and length are those of a zip, plain or compressed, in which it is to be located."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """A foreign checkpoint's table of contents."""

    format: str
    """`dcp`, `torch` or `safetensors`."""
    root: str
    """The folder or prefix that the files stand in."""
    files: tuple[CkptFile, ...]
    """In the form of a manifest's files, without digests: there are none."""
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    opaque: Mapping[str, str] = field(default_factory=dict)
    """What has no form here, by name, and why. It is neither read nor converted."""
    items: tuple[tuple[int, int, int, str, str], ...] = ()
    """Zips inside files: file, offset, bytes, `torch` or `zstd`, and whose they are."""
    integer_keyed: frozenset[tuple[PathItem, ...]] = frozenset()
    """Paths of mappings with integers for keys, which else look like lists."""
    digest: str = ""
    """XXH3-128 of the document that this is; hex. Other tensors, values or sizes have another."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each storage counted once."""
        return sum(record.num_bytes for record in self.tensors.values() if record.same_as is None)

    @classmethod
    def from_document(cls, document: bytes) -> Catalogue:
        """The catalogue in a document that `foreign_open` gave."""
        raw = json.loads(document)
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
            integer_keyed=frozenset(tuple(path) for path in raw["integer_keyed"]),
            digest=_native.xxh3_128(document).hex(),
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


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in items, of a box in C order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
