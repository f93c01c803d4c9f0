"""Memory for tensors on their way from one checkpoint to another, used again and again."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Memory", "aligned", "carve"]

# No dtype asks for more.
_ALIGNMENT = 16


class Memory:
    """Blocks of one size, each beginning with a page and kept for the next user. Threads may share it.

    Fresh memory costs more than reading into it, and what an allocator keeps of it nobody counts.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self) -> npt.NDArray[np.uint8]:
        """A block; its contents are what they are."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        block = mmap.mmap(-1, self._block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel built without huge pages refuses the advice.
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(block, np.uint8)

    def give_back(self, block: npt.NDArray[np.uint8]) -> None:
        """For a block that nobody uses any more."""
        self._free.append(block)


def carve(
    block: npt.NDArray[np.uint8],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
    *,
    alignment: int = _ALIGNMENT,
) -> list[npt.NDArray[Any]]:
    """Arrays in C order one behind the other in a block, each at a multiple of `alignment` bytes."""
    arrays, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + math.prod(shape) * dtype.itemsize
        arrays.append(block[start:end].view(dtype).reshape(shape))
        start = aligned(end, alignment)
    return arrays


def aligned(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    """How many bytes an array takes in a block."""
    return -(-num_bytes // alignment) * alignment
