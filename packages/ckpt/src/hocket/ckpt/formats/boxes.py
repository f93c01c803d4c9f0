"""Boxes of tensors as byte ranges of files: any part of any tensor, whatever its chunks and strides."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.ckpt.chunks import Chunk, near
from hocket.ckpt.formats.catalogue import ForeignChunk, c_strides
from hocket.ckpt.planning import Box

__all__ = ["Filling", "index_of", "pieces", "whole"]


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
    if 0 in shape:
        return
    row_bytes, dim = item_bytes, len(shape)
    while dim and row_bytes * shape[dim - 1] <= limit:
        dim -= 1
        row_bytes *= shape[dim]
    if dim == 0:
        yield whole(shape)
        return
    rows = max(1, limit // row_bytes)
    below, extent = shape[dim:], shape[dim - 1]
    for lead in np.ndindex(shape[: dim - 1]):
        for row in range(0, extent, rows):
            yield Box(
                (*lead, row, *(0 for _ in below)), (*(1 for _ in lead), min(rows, extent - row), *below)
            )


@dataclass(slots=True)
class Filling:
    """Reads that fill arrays: byte ranges with addresses, and what is to be copied when they are done.

    Arrays and scratch memory stay alive as long as this does.
    """

    reads: list[tuple[int, int, int, int]] = field(default_factory=list)
    """File, offset, bytes, address: what `ckpt_read` takes."""
    _copies: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = field(default_factory=list)

    def add(self, target: npt.NDArray[Any], box: Box, chunks: Sequence[Chunk]) -> None:
        """Plans to fill an array with a box of the tensor that has these chunks."""
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

    def finish(self) -> None:
        """Copies what did not go straight to its place; call it when the reads are done."""
        for target, scratch in self._copies:
            target[...] = scratch

    def _add_part(self, target: npt.NDArray[Any], chunk: Chunk, inside: tuple[int, ...]) -> None:
        strides = chunk.strides if isinstance(chunk, ForeignChunk) else None
        if strides is None:
            strides = c_strides(chunk.size)
        item_bytes = target.itemsize
        base = chunk.offset + sum(map(_times, inside, strides)) * item_bytes
        # A dim of one item has no stride, and one of stride 0 repeats one item: neither is read along.
        kept = [dim for dim, extent in enumerate(target.shape) if extent > 1 and strides[dim] > 0]
        kept.sort(key=lambda dim: -strides[dim])
        sizes, steps = [target.shape[dim] for dim in kept], [strides[dim] for dim in kept]
        run_items, outer = 1, len(kept)
        while outer and steps[outer - 1] == run_items:
            outer -= 1
            run_items *= sizes[outer]
        gap = 1
        if outer and outer == len(kept):
            # Not even the closest items touch: what lies between them is read along, and passed over.
            outer, gap = outer - 1, steps[-1]
            run_items = (sizes[-1] - 1) * gap + 1
        is_direct = gap == 1 and kept == sorted(kept) and target.flags.c_contiguous
        if is_direct and math.prod(sizes) == target.size:
            address = target.ctypes.data
        else:
            # Whole strides, so that every `gap`th item is the box's.
            padded = [*sizes[:-1], (sizes[-1] - 1) * gap + 1] if sizes else []
            scratch = np.empty(padded, target.dtype)
            address = scratch.ctypes.data
            self._copies.append((target, _in_order(scratch[..., ::gap] if sizes else scratch, kept, target)))
        run_bytes = run_items * item_bytes
        for number, index in enumerate(np.ndindex(*sizes[:outer])):
            offset = base + sum(map(_times, index, steps)) * item_bytes
            self.reads.append((chunk.file, offset, run_bytes, address + number * run_bytes))


def _in_order(scratch: npt.NDArray[Any], dims: list[int], target: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scratch memory with axes for `dims` of the target, as something that broadcasts to the target."""
    ordered = scratch.transpose([dims.index(dim) for dim in sorted(dims)])
    return ordered.reshape([target.shape[dim] if dim in dims else 1 for dim in range(target.ndim)])


def _times(a: int, b: int) -> int:
    return a * b
