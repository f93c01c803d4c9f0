"""Geometry of boxes: indices, strides, and splitting to a size limit.

Planning of who writes which box is in `planning`. The extension has the rules, and intersects boxes with
chunks when it reads.
"""

from collections.abc import Iterable, Sequence
from operator import add
from typing import Any

from hocket.ckpt.document.planning import Box
from hocket.native import _native

__all__ = ["BoxRead", "c_strides", "index_of", "pieces", "whole"]

BoxRead = tuple[str, Sequence[int], Sequence[int], int, Sequence[int] | None]
"""A box of a tensor to read: the tensor, the box's start and size, and the address and strides in bytes of
its destination (no strides for C order), as `_native.Checkpoint.read_boxes` takes them."""


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-order box, in items."""
    return _native.ckpt_c_strides(shape)


def index_of(start: Iterable[int], size: Iterable[int]) -> tuple[Any, ...]:
    """Return the array index of a box. It ends with an ellipsis, so that a 0-d array gives a view."""
    return (*(slice(a, a + n) for a, n in zip(start, size, strict=True)), ...)


def pieces(box: Box, item_bytes: int, limit: int) -> list[Box]:
    """Return boxes of at most `limit` bytes that, concatenated, are `box` in C order.

    A piece has at least one item, even if that is larger than `limit`. An empty box has no pieces.
    """
    cut = _native.ckpt_pieces(box.size, max(1, limit // item_bytes))
    return [Box(tuple(map(add, box.start, start)), tuple(size)) for start, size in cut]
