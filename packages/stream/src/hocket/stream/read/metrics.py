"""Counters of reading and waiting, for loggers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hocket.native import _native

#: A column and a batch as `BatchReader.next` returns them.
PackedColumn = tuple[memoryview, memoryview | None, memoryview | None]
PackedBatch = tuple[int, int, int, list[PackedColumn]]


class WaitCounters:
    """Counters of batches, and of the time that their consumer waited for them."""

    def __init__(self) -> None:
        self.batches = 0
        """Number of batches taken."""
        self.wait_s = 0.0
        """Seconds that the consumer waited for batches."""
        self.queue_depth = 0
        """Number of finished batches in the queue at the last request."""

    def next(self, reader: _native.BatchReader) -> PackedBatch | None:
        """Return the reader's next batch, and count it and the time waited."""
        self.queue_depth = reader.queued()
        start = time.perf_counter()
        try:
            batch = reader.next()
        finally:
            self.wait_s += time.perf_counter() - start
        self.batches += batch is not None
        return batch

    def look_up(
        self, caches: list[_native.ShardCache], order: _native.EpochOrder
    ) -> list[PackedColumn] | None:
        """Return the only batch of a listed order if all its shards are cached, else None; count it."""
        start = time.perf_counter()
        try:
            columns = _native.look_up(caches, order)
        finally:
            self.wait_s += time.perf_counter() - start
        self.batches += columns is not None
        return columns


def metrics(
    caches: Sequence[_native.ShardCache],
    limit: _native.CacheLimit | None,
    waits: WaitCounters,
    *,
    num_replaced: int,
) -> dict[str, float]:
    """Return the summed counters of all caches, and the waits, by names that start with `stream/`."""
    counts = [cache.counters() for cache in caches]
    return {
        "stream/batches": waits.batches,
        "stream/wait_s": waits.wait_s,
        "stream/queue_depth": waits.queue_depth,
        "stream/cache_hits": sum(count["cache_hits"] for count in counts),
        "stream/fetches": sum(count["fetches"] for count in counts),
        "stream/fetched_bytes": sum(count["fetched_bytes"] for count in counts),
        "stream/requests": sum(count["requests"] for count in counts),
        "stream/retries": sum(count["retries"] for count in counts),
        "stream/passed": sum(count["passed"] for count in counts),
        "stream/evicted": 0 if limit is None else limit.num_evicted,
        "stream/replaced": num_replaced,
    }
