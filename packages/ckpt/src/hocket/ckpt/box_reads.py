"""Plans of byte-range reads that fill arrays with boxes of tensors, for any chunks and strides."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.boxes import c_strides, cut, index_of, intersect, runs
from hocket.ckpt.chunks import Chunk, ForeignChunk, near
from hocket.ckpt.memory import aligned
from hocket.ckpt.planning import Box

__all__ = ["BoxReads", "Read"]

Read = tuple[int, int, int, int]
"""File index, offset, number of bytes and address, as `_native.Checkpoint.read` takes them."""

_LEAST_SCRATCH_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 20

# Gaps of up to this size between two runs are read too, because another read would cost more. An object
# store client merges reads across gaps of some MiB, so these gaps count as memory.
_HOLE_BYTES = 16 << 10
_STORE_HOLE_BYTES = 3 << 20

# Memory overhead of a read, in bytes.
_READ_BYTES = 256

# Runs of at least this size are read directly into place, one read per run.
_LONG_RUN_BYTES = 4 << 10


@dataclass(slots=True)
class BoxReads:
    """Reads that fill arrays, and references that keep the arrays alive.

    Data with the same layout in the file and in the array is read directly into place. Other data is read
    through scratch memory in slices of the file, front to back. The scratch memory is as large as all arrays
    together, but at least 1 MiB and at most `scratch_bytes`, however far apart the items are.

    Args:
        is_remote: Whether the file is in an object store.
        scratch_bytes: Limit of the scratch memory.
    """

    is_remote: bool = False
    scratch_bytes: int = _SCRATCH_BYTES
    _direct: list[Read] = field(default_factory=list)
    _scattered: list["_Part"] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, target: npt.NDArray[Any], box: Box, chunks: Sequence[Chunk]) -> None:
        """Plan the reads that fill an array with a box of the tensor that `chunks` store."""
        if target.flags.c_contiguous and self.add_chunk(target.ctypes.data, target.nbytes, box, chunks):
            return
        self._num_bytes += target.nbytes
        for chunk in near(chunks, *box):
            stored = Box(chunk.start, chunk.size)
            if shared := intersect(box, stored):
                target_start = tuple(c - a for c, a in zip(shared.start, box.start, strict=True))
                chunk_start = tuple(c - b for c, b in zip(shared.start, stored.start, strict=True))
                self._add_part(target[index_of(target_start, shared.size)], chunk, chunk_start)

    def add_chunk(self, address: int, num_bytes: int, box: Box, chunks: Sequence[Chunk]) -> bool:
        """Plan the read of a box that is exactly one chunk into C-order memory; return False for any other.

        This is all that most of the tensors of a checkpoint need, and costs a fraction of the general case.
        """
        if len(chunks) != 1:
            return False
        chunk = chunks[0]
        if chunk.size != box.size or chunk.start != box.start:
            return False
        if isinstance(chunk, ForeignChunk) and chunk.strides not in (None, c_strides(chunk.size)):
            return False
        if num_bytes:
            self._direct.append((chunk.file, chunk.offset, num_bytes, address))
        return True

    def run(self, read: Callable[[list[Read]], object]) -> None:
        """Fill the arrays; `read` executes a list of reads."""
        for reads, slices in self._batches():
            read(reads)
            for part, box, items in slices:
                part.place(box, items)

    def _batches(self) -> Iterator[tuple[list[Read], list["_Slice"]]]:
        """Yield batches: the reads, and the slices of scratch memory that they fill."""
        limit = min(max(self._num_bytes, _LEAST_SCRATCH_BYTES), self.scratch_bytes)
        scratch = np.empty(limit if self._scattered else 0, np.uint8)
        reads, used = list(self._direct), 0
        slices: list[_Slice] = []
        for part in self._scattered:
            for number, box in enumerate(cut(part.sizes, part.packed, max(1, limit // part.target.itemsize))):
                num_bytes = part.span_bytes(box)
                # Two slices of one part may be so far apart that the store fetches more than both.
                if number or used + num_bytes > limit:
                    yield reads, slices
                    reads, slices, used = [], [], 0
                items = scratch[used : used + num_bytes]
                reads += part.reads(box, items)
                slices.append((part, box, items))
                used = aligned(used + num_bytes)
        if reads:
            yield reads, slices

    def _add_part(self, target: npt.NDArray[Any], chunk: Chunk, start: tuple[int, ...]) -> None:
        strides = chunk.strides if isinstance(chunk, ForeignChunk) else None
        if strides is None:
            strides = c_strides(chunk.size)
        offset = chunk.offset + _bytes_to(start, strides, target)
        # A dim of size 1 has no stride, and one of stride 0 repeats one item: neither adds bytes to read.
        dims = [dim for dim, extent in enumerate(target.shape) if extent > 1 and strides[dim] > 0]
        dims.sort(key=lambda dim: -strides[dim])
        sizes, steps = [target.shape[dim] for dim in dims], [strides[dim] for dim in dims]
        num_outer, run_items = runs(sizes, steps)
        run_bytes = run_items * target.itemsize
        is_in_place = dims == sorted(dims) and target.flags.c_contiguous and math.prod(sizes) == target.size
        # Overlapping items are excluded, although their span may equal their number.
        is_plain = tuple(steps[num_outer:]) == c_strides(tuple(sizes[num_outer:]))
        if is_in_place and is_plain and (num_outer == 0 or run_bytes >= _LONG_RUN_BYTES):
            run_offsets = _all_bytes_to(sizes[:num_outer], steps, target, offset)
            addresses = itertools.count(target.ctypes.data, run_bytes)
            self._direct += [
                (chunk.file, run_offset, run_bytes, address)
                for run_offset, address in zip(run_offsets, addresses, strict=False)
            ]
        else:
            hole = (_STORE_HOLE_BYTES if self.is_remote else _HOLE_BYTES) // target.itemsize
            num_outer, run_items = runs(sizes, steps, hole)
            row = max(run_items, _READ_BYTES // target.itemsize)
            packed = [step * row for step in c_strides(tuple(sizes[:num_outer]))] + steps[num_outer:]
            self._scattered.append(_Part(target, chunk.file, offset, dims, sizes, steps, num_outer, packed))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an array whose items are stored in another order, or not contiguously."""

    target: npt.NDArray[Any]
    file: int
    offset: int
    """Offset of the first item in the file."""
    dims: list[int]
    """The target's dims along which the file stores distinct items, by descending stride."""
    sizes: list[int]
    """Sizes of these dims. Boxes of a part have the same dims."""
    steps: list[int]
    """Their strides in the file, in items."""
    num_outer: int
    """The number of these dims that step between contiguous runs."""
    packed: list[int]
    """Their strides in scratch memory, where the runs are adjacent."""

    def span_bytes(self, box: Box) -> int:
        """Return the bytes that a box takes in scratch memory."""
        return _bytes_to([size - 1 for size in box.size], self.packed, self.target) + self.target.itemsize

    def reads(self, box: Box, scratch: npt.NDArray[np.uint8]) -> list[Read]:
        """Return the reads of a box's runs into scratch memory."""
        outer, inner = box.size[: self.num_outer], box.size[self.num_outer :]
        last = [0 for _ in outer] + [size - 1 for size in inner]
        num_bytes = _bytes_to(last, self.steps, self.target) + self.target.itemsize
        begin = self.offset + _bytes_to(box.start, self.steps, self.target)
        offsets = _all_bytes_to(outer, self.steps, self.target, begin)
        addresses = _all_bytes_to(outer, self.packed, self.target, scratch.ctypes.data)
        return [
            (self.file, offset, num_bytes, address)
            for offset, address in zip(offsets, addresses, strict=True)
        ]

    def place(self, box: Box, scratch: npt.NDArray[np.uint8]) -> None:
        """Copy a box's items from scratch memory to the target, repeated items to each position."""
        shape, strides = [1] * self.target.ndim, [0] * self.target.ndim
        index = [slice(None)] * self.target.ndim
        for dim, start, size, step in zip(self.dims, *box, self.packed, strict=True):
            shape[dim], strides[dim] = size, step * self.target.itemsize
            index[dim] = slice(start, start + size)
        self.target[tuple(index)] = np.ndarray(shape, self.target.dtype, scratch, strides=strides)


_Slice = tuple[_Part, Box, npt.NDArray[np.uint8]]
"""A part, a box of it, and the scratch memory for the box."""


def _bytes_to(index: Sequence[int], strides: Sequence[int], array: npt.NDArray[Any]) -> int:
    """Return the bytes from an array's first item to the item at an index."""
    return int(sum(map(mul, index, strides)) * array.itemsize)


def _all_bytes_to(
    sizes: Sequence[int], strides: Sequence[int], array: npt.NDArray[Any], begin: int
) -> list[int]:
    """Return the bytes to each item of a box, in C order; dims that `sizes` omits have index 0."""
    if not sizes:
        return [begin]
    offsets = np.array(begin)
    for size, stride in zip(sizes, strides, strict=False):
        offsets = offsets[..., None] + np.arange(size) * (stride * array.itemsize)
    flat: list[int] = offsets.reshape(-1).tolist()
    return flat
