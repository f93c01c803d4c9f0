"""Chunks of a tensor: boxes and their byte ranges, held as columns so that a million of them stay cheap."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, Literal, overload

__all__ = ["Chunk", "Columns", "ForeignChunk", "files_of", "near"]

# With fewer chunks, a scan of all of them costs less than a search.
_SEARCHED_FROM = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, and the byte range that stores it."""

    file: int
    """Index in the manifest's `files`."""
    offset: int
    """Start of the chunk in that file's data, in bytes."""
    length: int
    """Size in bytes: items × item size."""
    start: tuple[int, ...]
    """Offsets of the box in the global tensor."""
    size: tuple[int, ...]
    """Shape of the box."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignChunk(Chunk):
    """A box of a tensor in a foreign file; its offset counts from the start of the file."""

    strides: tuple[int, ...] | None = None
    """Strides in items; None for C order."""
    wrapped: Literal["torch", "zstd"] | None = None
    """Whether offset and length are those of an enclosing zip, plain or compressed, not yet located."""


class Columns(Sequence[Chunk]):
    """A sequence of chunks stored as columns, as in the manifest; each `Chunk` object is created on access.

    Args:
        columns: `file`, `offset`, `length`, and one column per dim of `start` and `size`.
    """

    __slots__ = ("_columns", "_longest")

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._longest: int | None = None
        """Greatest size of a chunk along dim 0; -1 if they are not sorted along it; None if not computed."""

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

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns, as in the manifest."""
        return self._columns

    @property
    def files(self) -> Sequence[int]:
        """The file index of each chunk."""
        files: Sequence[int] = self._columns["file"]
        return files

    def _in_reach(self, start: Sequence[int], size: Sequence[int]) -> range:
        """Return a range of indices that contains all chunks which overlap a box along dim 0."""
        if not start or len(self) < _SEARCHED_FROM:
            return range(len(self))
        starts = self._columns["start"][0]
        if self._longest is None:
            # A manifest lists chunks by offset, which this checks rather than assumes.
            is_sorted = all(map(le, starts, itertools.islice(starts, 1, None)))
            self._longest = max(self._columns["size"][0]) if is_sorted else -1
        if self._longest < 0:
            return range(len(self))
        low, high = start[0] - self._longest + 1, start[0] + size[0]
        return range(bisect.bisect_left(starts, low), bisect.bisect_left(starts, high))

    def near(self, start: Sequence[int], size: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that overlap a box."""
        indices: Iterable[int] = self._in_reach(start, size)
        dims = zip(self._columns["start"], self._columns["size"], start, size, strict=True)
        for starts, sizes, low, extent in dims:
            high = low + extent
            indices = [i for i in indices if starts[i] < high and starts[i] + sizes[i] > low]
        return (self[i] for i in indices)


def near(chunks: Sequence[Chunk], start: Sequence[int], size: Sequence[int]) -> Iterable[Chunk]:
    """Return the chunks that may overlap a box; for `Columns`, exactly those that do."""
    return chunks.near(start, size) if isinstance(chunks, Columns) else chunks


def files_of(chunks: Sequence[Chunk]) -> Sequence[int]:
    """Return the file index of each chunk."""
    return chunks.files if isinstance(chunks, Columns) else [chunk.file for chunk in chunks]
