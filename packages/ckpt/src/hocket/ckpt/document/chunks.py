"""Chunks of a tensor: boxes and their byte ranges. A million stay cheap, as columns in the extension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from hocket.native import _native

__all__ = ["Chunk", "ChunkColumns", "files_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, and the byte range that stores it."""

    file: int
    """Index in the `files` of the contents."""
    offset: int
    """Start of the chunk in that file's data, or in the file or zip of another format, in bytes."""
    length: int
    """Size in bytes: items × item size."""
    start: tuple[int, ...]
    """Offsets of the box in the global tensor."""
    size: tuple[int, ...]
    """Shape of the box."""


class ChunkColumns(Sequence[Chunk]):
    """The chunks of a tensor in a checkpoint; each `Chunk` object is created on access.

    Args:
        columns: The columns as in the manifest, or those of the extension, which become Python objects when
            they are first needed. The extension keeps the strides of other formats' chunks, and locates those
            inside zips when it reads.
    """

    __slots__ = ("_columns", "_table")

    def __init__(self, columns: _native.ChunkColumns | Mapping[str, Any]) -> None:
        self._table: _native.ChunkColumns | None = None
        self._columns: Mapping[str, Any] | None = None
        # A check for `Mapping` is slower, and checkpoints have many tensors.
        if isinstance(columns, _native.ChunkColumns):
            self._table = columns
        else:
            self._columns = columns

    def __reduce__(self) -> tuple[type[ChunkColumns], tuple[Mapping[str, Any]]]:
        return ChunkColumns, (self.columns,)

    def __len__(self) -> int:
        return len(self.files if self._table is None else self._table)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        columns = self.columns
        return Chunk(
            file=columns["file"][index],
            offset=columns["offset"][index],
            length=columns["length"][index],
            start=tuple(column[index] for column in columns["start"]),
            size=tuple(column[index] for column in columns["size"]),
        )

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of the manifest: `file`, `offset`, `length`, and one per dim of `start` and `size`."""
        if self._columns is None:
            assert self._table is not None
            self._columns = self._table.to_dict()
        return self._columns

    @property
    def files(self) -> Sequence[int]:
        """The file index of each chunk."""
        files: Sequence[int] = self.columns["file"]
        return files


def files_of(chunks: Sequence[Chunk]) -> Sequence[int]:
    """Return the file index of each chunk."""
    return chunks.files if isinstance(chunks, ChunkColumns) else [chunk.file for chunk in chunks]
