"""One data set's native parts in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hocket.native import _native
from hocket.stream.columns import ColumnSet
from hocket.stream.encodings import Column
from hocket.stream.errors import IndexCorruptError
from hocket.stream.location import Location

logger = logging.getLogger("hocket.stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """How shards are fetched and checked; none of it changes what is read."""

    validate_hash: str | None = None
    """The digest to check; None for the quickest one that the index carries."""

    keep_zip: bool = False
    """Keep a downloaded compressed shard beside the raw one."""

    download_timeout: float = 120.0
    """Seconds that all tries of one request may take together."""

    download_retry: int = 3
    """Fetches of a shard before wrong bytes are final."""

    prefetch_bytes: int = 256 << 20
    """Bytes of shards that may be fetched ahead of their first use."""

    prefetch_batches: int = 4
    """Finished batches that may wait."""

    fetch_threads: int = 8
    """Shards that are fetched at once."""

    allow_unsafe_types: bool = False
    """Take columns whose decoding runs code out of the data."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """A rank's part of one global batch."""

    number: int
    """The batch's number in its epoch."""

    local: int
    """Samples that count here. Where it is 0, `columns` hold one sample all the same, for the step."""

    total: int
    """Samples that count over all ranks."""

    columns: dict[str, Column]
    """Values by column: an array, or a list where values differ in size."""


class Engine:
    """The index, and the shards as this process sees them.

    The index is safe in a forked child; the cache is made anew there. Pickling keeps neither: the other
    process opens the index again and refuses one that has changed meanwhile.
    """

    def __init__(self, location: Location, settings: ReadSettings) -> None:
        self.location = location
        self.settings = settings
        self._open()

    def _open(self) -> None:
        location = self.location
        data = _native.load_shard_index(
            location.local, location.remote, deadline_s=self.settings.download_timeout
        )
        origin = f"{location.origin.rstrip('/')}/index.json"
        self.index = _native.ShardIndex.parse(data, origin)
        unsafe = self.settings.allow_unsafe_types
        self._columns = ColumnSet(self.index, origin=origin, allow_unsafe_types=unsafe)
        self.encodings = self._columns.encodings
        self._cache = self._make_cache()
        self._process = os.getpid()

    def _make_cache(self) -> _native.ShardCache:
        return _native.ShardCache(
            self.index,
            self.location.local,
            self.location.remote,
            deadline_s=self.settings.download_timeout,
            keep_zip=self.settings.keep_zip,
            attempts=self.settings.download_retry,
            validate_hash=self.settings.validate_hash,
        )

    def read(
        self, order: _native.EpochOrder, *, rank: int, world_size: int, first: int, stride: int
    ) -> Iterator[RankBatch]:
        """Yield a rank's part of batches `first`, `first + stride`, …, read ahead by native threads."""
        if self._process != os.getpid():
            # The parent's cache may have been forked in the middle of something.
            self._cache, self._process = self._make_cache(), os.getpid()
        cache = self._cache
        reader = cache.read(
            order,
            rank=rank,
            world_size=world_size,
            first=first,
            stride=stride,
            prefetch_bytes=self.settings.prefetch_bytes,
            prefetch_batches=self.settings.prefetch_batches,
            fetch_threads=self.settings.fetch_threads,
        )
        try:
            while True:
                try:
                    batch = reader.next()
                finally:
                    for notice in cache.take_notices():
                        logger.warning("%s", notice)
                if batch is None:
                    return
                number, local, total, columns = batch
                yield RankBatch(number, local, total, self._columns.decode(columns, max(local, 1)))
        finally:
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "settings": self.settings, "fingerprint": self.index.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.location, self.settings = state["location"], state["settings"]
        self._open()
        if self.index.fingerprint != state["fingerprint"]:
            raise IndexCorruptError(
                f"the data set at `{self.location.origin}` has fingerprint {self.index.fingerprint}, and "
                f"had {state['fingerprint']} when this run began: it was written anew; begin the run again"
            )
