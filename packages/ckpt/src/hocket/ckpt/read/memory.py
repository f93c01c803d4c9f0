"""Reusable memory blocks for tensors that are copied from one checkpoint to another."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Memory", "aligned", "carve"]

# No dtype needs a larger alignment.
_ALIGNMENT = 16


class Memory:
    """A thread-safe pool of page-aligned blocks of one size.

    Allocating fresh memory costs more than reading into it, and an allocator's retained memory would not
    count towards the memory limit.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a block with undefined contents."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        block = mmap.mmap(-1, self._block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without huge pages rejects `madvise`.
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(block, np.uint8)

    def give_back(self, block: npt.NDArray[np.uint8]) -> None:
        """Return a block to the pool; nothing may use it any more."""
        self._free.append(block)


def carve(
    block: npt.NDArray[np.uint8],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
    *,
    alignment: int = _ALIGNMENT,
) -> list[npt.NDArray[Any]]:
    """Return consecutive C-order arrays in a block, each at a multiple of `alignment` bytes."""
    arrays, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        arrays.append(block[start:end].view(dtype).reshape(shape))
        start = aligned(end, alignment)
    return arrays


def aligned(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    """Return the number of bytes that an array occupies in a block."""
    return -(-num_bytes // alignment) * alignment
