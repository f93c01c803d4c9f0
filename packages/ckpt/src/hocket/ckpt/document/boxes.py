"""Geometry of boxes: indices, strides, and splitting to a size limit.

Planning of who writes which box is in `planning`. The extension intersects boxes with chunks when it reads.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Any

import numpy as np

from hocket.ckpt.document.planning import Box

__all__ = ["BoxRead", "c_strides", "index_of", "pieces", "whole"]

BoxRead = tuple[str, Sequence[int], Sequence[int], int, Sequence[int] | None]
"""A box of a tensor to read: the tensor, the box's start and size, and the address and strides in bytes of
its destination (no strides for C order), as `_native.Checkpoint.read_boxes` takes them."""


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-order box, in items."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def index_of(start: Iterable[int], size: Iterable[int]) -> tuple[Any, ...]:
    """Return the array index of a box. It ends with an ellipsis, so that a 0-d array gives a view."""
    return (*(slice(a, a + n) for a, n in zip(start, size, strict=True)), ...)


def pieces(box: Box, item_bytes: int, limit: int) -> list[Box]:
    """Return boxes of at most `limit` bytes that, concatenated, are `box` in C order.

    A piece has at least one item, even if that is larger than `limit`. An empty box has no pieces.
    """
    if 0 in box.size:
        return []
    cut = _cut(box.size, c_strides(box.size), max(1, limit // item_bytes))
    return [Box(tuple(map(add, box.start, piece.start)), piece.size) for piece in cut]


def _cut(sizes: Sequence[int], strides: Sequence[int], limit: int) -> Iterator[Box]:
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
