"""Which bytes of a chunk a box needs: pure arithmetic, for every reader."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hocket.ckpt.manifest import Chunk
from hocket.ckpt.planning import Box

__all__ = ["Overlap", "overlap"]


class Overlap(NamedTuple):
    """What a chunk and a box share, and the one run of whole rows of the chunk that holds it."""

    box: Box
    """The shared part, in the global tensor."""
    first: int
    """The item of the chunk at which the run begins."""
    rows: tuple[int, ...]
    """Shape of the run."""
    skip: tuple[int, ...]
    """Where in that shape the shared part begins."""

    @property
    def num_items(self) -> int:
        """Items of the run."""
        return math.prod(self.rows)

    def within(self, start: Sequence[int]) -> tuple[slice, ...]:
        """The shared part in an array that begins at `start` of the global tensor."""
        return tuple(slice(a - s, a - s + n) for a, n, s in zip(*self.box, start, strict=True))

    @property
    def wanted(self) -> tuple[slice, ...]:
        """The shared part in the run."""
        return tuple(slice(a, a + n) for a, n in zip(self.skip, self.box.size, strict=True))


def overlap(chunk: Chunk, box: Box) -> Overlap | None:
    """What of a chunk lies in a box; None where nothing does."""
    start = tuple(map(max, chunk.start, box.start))
    size = tuple(
        min(a + m, b + n) - s
        for a, m, b, n, s in zip(chunk.start, chunk.size, box.start, box.size, start, strict=True)
    )
    if any(length <= 0 for length in size):
        return None
    within = [s - c for s, c in zip(start, chunk.start, strict=True)]
    # Leading dims of which one item is wanted only shift the run; the first other one bounds it.
    dim = next((dim for dim, length in enumerate(size) if length > 1), len(size))
    rows = (*size[: dim + 1], *chunk.size[dim + 1 :])
    skip = (*([0] * min(dim + 1, len(size))), *within[dim + 1 :])
    strides = [math.prod(chunk.size[d + 1 :]) for d in range(len(size))]
    first = sum(w * stride for w, stride in zip(within[: dim + 1], strides, strict=False))
    return Overlap(Box(start, size), first, rows, skip)
