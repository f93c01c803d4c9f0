"""A tensor's chunks: boxes, and where their bytes lie; a million of them as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

__all__ = ["Chunk", "Columns", "near"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, and where its bytes lie."""

    file: int
    """Index in the manifest's `files`."""
    offset: int
    """Where it begins in that file's data, in bytes."""
    length: int
    """Bytes: items × item size."""
    start: tuple[int, ...]
    """Offsets of the box in the global tensor."""
    size: tuple[int, ...]
    """Shape of the box."""


class Columns(Sequence[Chunk]):
    """Chunks as a manifest has them: each becomes an object only when it is looked at.

    Args:
        columns: `file`, `offset`, `length`, and a column a dim of `start` and `size`.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["file"])

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        columns = self._columns
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

    def near(self, start: Sequence[int], size: Sequence[int]) -> Iterator[Chunk]:
        """The chunks that share something with a box."""
        indices: Iterable[int] = range(len(self))
        dims = zip(self._columns["start"], self._columns["size"], start, size, strict=True)
        for starts, sizes, low, extent in dims:
            high = low + extent
            indices = [i for i in indices if starts[i] < high and starts[i] + sizes[i] > low]
        return (self[i] for i in indices)


def near(chunks: Sequence[Chunk], start: Sequence[int], size: Sequence[int]) -> Iterable[Chunk]:
    """The chunks that may share something with a box: of columns, those that do."""
    return chunks.near(start, size) if isinstance(chunks, Columns) else chunks
