"""The shards that a node reads, fetches and keeps in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.stream.read.dataset_index import IndexEntry
from hocket.stream.simulate.results import NodeUse


class NodeReads:
    """The shards that a node reads in each batch, and what it fetches and keeps.

    Args:
        shards: The shards of all streams.
        batches: Numbers of the shards of the node's samples, by batch.
        cache_limit: Maximum raw bytes in the cache; None for no limit.
    """

    def __init__(
        self, shards: Sequence[IndexEntry], batches: Sequence[NDArray[np.int64]], cache_limit: int | None
    ) -> None:
        self._raw = [shard.raw_bytes for shard in shards]
        self._stored = [shard.stored_bytes for shard in shards]
        self._num_samples = sum(len(ids) for ids in batches)
        self._steps = [list(dict.fromkeys(ids.tolist())) for ids in batches]
        self._fetched, self._cached = list_fetches(self._steps, self._raw, cache_limit)

    def use(self) -> NodeUse:
        """Return the totals."""
        fetched = [shard for step in self._fetched for shard in step]
        return NodeUse(
            num_samples=self._num_samples,
            num_shards=len(set().union(*self._steps)),
            num_fetches=len(fetched),
            fetched_bytes=sum(self._stored[shard] for shard in fetched),
            cache_bytes=_live_bytes(self._steps, self._raw),
        )

    def fetched_series(self, groups: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the stored bytes that are fetched in each group of batches."""
        sums = np.cumsum([0, *(sum(self._stored[shard] for shard in step) for step in self._fetched)])
        return tuple(np.diff(sums[[0, *groups]]).tolist())

    def cache_series(self, groups: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the raw bytes in the cache after each group of batches."""
        return tuple(self._cached[end - 1] for end in groups.tolist())


def list_fetches(
    steps: list[list[int]], raw: list[int], limit: int | None
) -> tuple[list[list[int]], list[int]]:
    """Return the fetched shards of each step in order, and the bytes kept after it, with LRU eviction."""
    cached: OrderedDict[int, None] = OrderedDict()
    num_bytes = 0
    fetched: list[list[int]] = []
    kept = []
    for step in steps:
        fetched.append([])
        for shard in step:
            if shard in cached:
                cached.move_to_end(shard)
                continue
            fetched[-1].append(shard)
            cached[shard] = None
            num_bytes += raw[shard]
            while limit is not None and num_bytes > limit and len(cached) > 1:
                num_bytes -= raw[cached.popitem(last=False)[0]]
        kept.append(num_bytes)
    return fetched, kept


def _live_bytes(steps: list[list[int]], raw: list[int]) -> int:
    """Return the maximum of the bytes of shards that are between their first and their last batch."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for shard in step:
            first.setdefault(shard, number)
            last[shard] = number
    change = np.zeros(len(steps) + 1, np.int64)
    for shard, number in first.items():
        change[number] += raw[shard]
        change[last[shard] + 1] -= raw[shard]
    return int(np.cumsum(change).max())
