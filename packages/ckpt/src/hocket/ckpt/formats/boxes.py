"""Boxes of tensors as byte ranges of files: any part of any tensor, whatever its chunks and strides."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.chunks import Chunk, near
from hocket.ckpt.formats.catalogue import ForeignChunk, c_strides
from hocket.ckpt.memory import aligned
from hocket.ckpt.planning import Box

__all__ = ["Filling", "Read", "index_of", "pieces", "whole"]

Read = tuple[int, int, int, int]
"""File, offset, bytes, address: what `ckpt_read` takes."""

_LEAST_SLICE_BYTES = 1 << 20
_LARGEST_SLICE_BYTES = 64 << 20

# Up to so many bytes between two runs are read along: another read costs more than to pass them over. Of a
# store, up to some MiB between two reads are fetched anyway: so they are counted as what takes memory.
_HOLE_BYTES = 16 << 10
_STORE_HOLE_BYTES = 3 << 20

# What a read costs in memory, beside its bytes.
_READ_BYTES = 256

# Runs of so many bytes go straight to their places, each by a read of its own.
_LONG_RUN_BYTES = 4 << 10


def index_of(start: Iterable[int], size: Iterable[int]) -> tuple[Any, ...]:
    """What to index an array with for a box of it; with an ellipsis, lest a 0-d array come as a copy."""
    return (*(slice(a, a + n) for a, n in zip(start, size, strict=True)), ...)


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def pieces(shape: tuple[int, ...], item_bytes: int, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` bytes that, one after the other, are the tensor in C order.

    A box has at least one item. A tensor without items has no boxes.
    """
    if 0 not in shape:
        yield from _cut(shape, c_strides(shape), max(1, limit // item_bytes))


def _cut(sizes: Sequence[int], strides: Sequence[int], limit: int) -> Iterator[Box]:
    """Boxes whose items lie within `limit` items of each other, by where they begin; strides descend."""
    span, dim = 1, len(sizes)
    while dim and span + (sizes[dim - 1] - 1) * strides[dim - 1] <= limit:
        dim -= 1
        span += (sizes[dim] - 1) * strides[dim]
    if dim == 0:
        yield whole(tuple(sizes))
        return
    rows = (limit - span) // strides[dim - 1] + 1
    below, extent = tuple(sizes[dim:]), sizes[dim - 1]
    for lead in np.ndindex(*sizes[: dim - 1]):
        for row in range(0, extent, rows):
            yield Box(
                (*lead, row, *(0 for _ in below)), (*(1 for _ in lead), min(rows, extent - row), *below)
            )


def _runs(sizes: Sequence[int], strides: Sequence[int], hole: int = 0) -> tuple[int, int]:
    """How many leading dims step from run to run, and how many items a run spans; strides descend.

    Items with holes of at most `hole` items between them are one run; so are those that lie over each other.
    """
    span, run = 1, (len(sizes), 1)
    for dim in reversed(range(len(sizes))):
        is_near = strides[dim] <= span + hole
        span += (sizes[dim] - 1) * strides[dim]
        if is_near:
            run = dim, span
    return run


@dataclass(slots=True)
class Filling:
    """Reads that fill arrays, which stay alive as long as this does.

    What lies in a file as it does in its array is read to its place. The rest goes by way of scratch memory,
    in slices of the file, front to back: as much at a time as all arrays take, but no less than 1 MiB and no
    more than 64, however far apart the items are.

    Args:
        is_remote: Whether a store is read.
    """

    is_remote: bool = False
    _direct: list[Read] = field(default_factory=list)
    _scattered: list["_Part"] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, target: npt.NDArray[Any], box: Box, chunks: Sequence[Chunk]) -> None:
        """Plans to fill an array with a box of the tensor that has these chunks."""
        self._num_bytes += target.nbytes
        for chunk in near(chunks, *box):
            start = tuple(map(max, box.start, chunk.start))
            size = tuple(
                min(a + n, b + m) - c
                for a, n, b, m, c in zip(box.start, box.size, chunk.start, chunk.size, start, strict=True)
            )
            if all(extent > 0 for extent in size):
                at = tuple(c - a for c, a in zip(start, box.start, strict=True))
                inside = tuple(c - b for c, b in zip(start, chunk.start, strict=True))
                self._add_part(target[index_of(at, size)], chunk, inside)

    def run(self, read: Callable[[list[Read]], object]) -> None:
        """Fills the arrays; `read` carries out reads, a list of them at a time."""
        for reads, slices in self._batches():
            read(reads)
            for part, box, items in slices:
                part.place(box, items)

    def _batches(self) -> Iterator[tuple[list[Read], list["_Slice"]]]:
        """What to read at a time, and which boxes of which parts the scratch memory has then."""
        limit = min(max(self._num_bytes, _LEAST_SLICE_BYTES), _LARGEST_SLICE_BYTES)
        scratch = np.empty(limit if self._scattered else 0, np.uint8)
        reads, used = list(self._direct), 0
        slices: list[_Slice] = []
        for part in self._scattered:
            for number, box in enumerate(_cut(part.sizes, part.packed, limit // part.target.itemsize)):
                num_bytes = part.span_bytes(box)
                # Two slices of one part may lie so far apart that a store is asked for more than both.
                if number or used + num_bytes > limit:
                    yield reads, slices
                    reads, slices, used = [], [], 0
                items = scratch[used : used + num_bytes]
                reads += part.reads(box, items)
                slices.append((part, box, items))
                used = aligned(used + num_bytes)
        if reads:
            yield reads, slices

    def _add_part(self, target: npt.NDArray[Any], chunk: Chunk, inside: tuple[int, ...]) -> None:
        strides = chunk.strides if isinstance(chunk, ForeignChunk) else None
        if strides is None:
            strides = c_strides(chunk.size)
        offset = chunk.offset + _bytes_to(inside, strides, target)
        # A dim of one item has no stride, and one of stride 0 repeats one item: neither is read along.
        dims = [dim for dim, extent in enumerate(target.shape) if extent > 1 and strides[dim] > 0]
        dims.sort(key=lambda dim: -strides[dim])
        sizes, steps = [target.shape[dim] for dim in dims], [strides[dim] for dim in dims]
        num_outer, run_items = _runs(sizes, steps)
        run_bytes = run_items * target.itemsize
        is_in_place = dims == sorted(dims) and target.flags.c_contiguous and math.prod(sizes) == target.size
        # Not so where items lie over each other, though they may span as many as they are.
        is_plain = tuple(steps[num_outer:]) == c_strides(tuple(sizes[num_outer:]))
        if is_in_place and is_plain and (num_outer == 0 or run_bytes >= _LONG_RUN_BYTES):
            places = _all_bytes_to(sizes[:num_outer], steps, target, offset)
            addresses = itertools.count(target.ctypes.data, run_bytes)
            self._direct += [
                (chunk.file, at, run_bytes, to) for at, to in zip(places, addresses, strict=False)
            ]
        else:
            hole = (_STORE_HOLE_BYTES if self.is_remote else _HOLE_BYTES) // target.itemsize
            num_outer, run_items = _runs(sizes, steps, hole)
            row = max(run_items, _READ_BYTES // target.itemsize)
            packed = [step * row for step in c_strides(tuple(sizes[:num_outer]))] + steps[num_outer:]
            self._scattered.append(_Part(target, chunk.file, offset, dims, sizes, steps, num_outer, packed))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an array whose items lie in a file in another order, or apart."""

    target: npt.NDArray[Any]
    file: int
    offset: int
    """Of its first item."""
    dims: list[int]
    """Of the target: those along which the file has other items, the largest step first."""
    sizes: list[int]
    """Of these dims, as are the boxes of a part."""
    steps: list[int]
    """Their strides in the file, in items."""
    num_outer: int
    """How many of them step from one run to another."""
    packed: list[int]
    """Their strides in scratch memory, where the runs stand side by side."""

    def span_bytes(self, box: Box) -> int:
        """Bytes that a box takes in scratch memory."""
        return _bytes_to([size - 1 for size in box.size], self.packed, self.target) + self.target.itemsize

    def reads(self, box: Box, scratch: npt.NDArray[np.uint8]) -> list[Read]:
        """Reads of a box's runs."""
        outer, inner = box.size[: self.num_outer], box.size[self.num_outer :]
        last = [0 for _ in outer] + [size - 1 for size in inner]
        num_bytes = _bytes_to(last, self.steps, self.target) + self.target.itemsize
        begin = self.offset + _bytes_to(box.start, self.steps, self.target)
        places = _all_bytes_to(outer, self.steps, self.target, begin)
        addresses = _all_bytes_to(outer, self.packed, self.target, scratch.ctypes.data)
        return [(self.file, at, num_bytes, to) for at, to in zip(places, addresses, strict=True)]

    def place(self, box: Box, scratch: npt.NDArray[np.uint8]) -> None:
        """Copies a box's items to the target, to each place of those that are repeated."""
        shape, strides = [1] * self.target.ndim, [0] * self.target.ndim
        index = [slice(None)] * self.target.ndim
        for dim, start, size, step in zip(self.dims, *box, self.packed, strict=True):
            shape[dim], strides[dim] = size, step * self.target.itemsize
            index[dim] = slice(start, start + size)
        self.target[tuple(index)] = np.ndarray(shape, self.target.dtype, scratch, strides=strides)


_Slice = tuple[_Part, Box, npt.NDArray[np.uint8]]
"""A box of a part, and scratch memory for it."""


def _bytes_to(index: Sequence[int], strides: Sequence[int], array: npt.NDArray[Any]) -> int:
    """Bytes from an array's first item to another."""
    return int(sum(map(mul, index, strides)) * array.itemsize)


def _all_bytes_to(
    sizes: Sequence[int], strides: Sequence[int], array: npt.NDArray[Any], begin: int
) -> list[int]:
    """Bytes to each item of a box, in C order; dims that `sizes` leaves out are at 0."""
    if not sizes:
        return [begin]
    at = np.array(begin)
    for size, stride in zip(sizes, strides, strict=False):
        at = at[..., None] + np.arange(size) * (stride * array.itemsize)
    places: list[int] = at.reshape(-1).tolist()
    return places
