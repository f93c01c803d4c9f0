"""Geometry of boxes: intersection, splitting to a size limit, and contiguous runs of strided boxes.

Planning of who writes which box is in `planning`; this module serves everything that reads or rewrites boxes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Any

import numpy as np

from hocket.ckpt.planning import Box

__all__ = ["c_strides", "cut", "index_of", "intersect", "pieces", "runs", "whole"]


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-order box, in items."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def index_of(start: Iterable[int], size: Iterable[int]) -> tuple[Any, ...]:
    """Return the array index of a box. It ends with an ellipsis, so that a 0-d array gives a view."""
    return (*(slice(a, a + n) for a, n in zip(start, size, strict=True)), ...)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if they have no item in common."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(
        min(a_start + a_size, b_start + b_size) - low
        for a_start, a_size, b_start, b_size, low in zip(*a, *b, start, strict=True)
    )
    return Box(start, size) if all(extent > 0 for extent in size) else None


def pieces(box: Box, item_bytes: int, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` bytes that, concatenated, are `box` in C order.

    A piece has at least one item, even if that is larger than `limit`. An empty box has no pieces.
    """
    if 0 in box.size:
        return
    for piece in cut(box.size, c_strides(box.size), max(1, limit // item_bytes)):
        yield Box(tuple(map(add, box.start, piece.start)), piece.size)


def cut(sizes: Sequence[int], strides: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield boxes whose items span at most `limit` items, sorted by offset; `strides` are descending."""
    span, dim = 1, len(sizes)
    while dim and span + (sizes[dim - 1] - 1) * strides[dim - 1] <= limit:
        dim -= 1
        span += (sizes[dim] - 1) * strides[dim]
    if dim == 0:
        yield whole(tuple(sizes))
        return
    rows = (limit - span) // strides[dim - 1] + 1
    inner_sizes, extent = tuple(sizes[dim:]), sizes[dim - 1]
    for outer_index in np.ndindex(*sizes[: dim - 1]):
        for row in range(0, extent, rows):
            yield Box(
                (*outer_index, row, *(0 for _ in inner_sizes)),
                (*(1 for _ in outer_index), min(rows, extent - row), *inner_sizes),
            )


def runs(sizes: Sequence[int], strides: Sequence[int], hole: int = 0) -> tuple[int, int]:
    """Return the number of leading dims that step between contiguous runs, and the items that a run spans.

    Items separated by at most `hole` items belong to one run, and so do overlapping items. Strides are
    descending.
    """
    span, run = 1, (len(sizes), 1)
    for dim in reversed(range(len(sizes))):
        is_near = strides[dim] <= span + hole
        span += (sizes[dim] - 1) * strides[dim]
        if is_near:
            run = dim, span
    return run
