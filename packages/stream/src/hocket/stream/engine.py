"""The native parts of a run's data in this process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.native import _native
from hocket.native.errors import StorePermissionError, StoreTransientError
from hocket.stream.arguments import seconds, switch, whole
from hocket.stream.columns import ColumnSet
from hocket.stream.defaults import (
    DOWNLOAD_ATTEMPTS,
    DOWNLOAD_TIMEOUT_S,
    FETCH_THREADS,
    PREFETCH_BATCHES,
    PREFETCH_BYTES,
)
from hocket.stream.encodings import Column
from hocket.stream.errors import ConfigError, IndexCorruptError, SampleCorruptError
from hocket.stream.location import Location
from hocket.stream.mending import StandIns
from hocket.stream.metrics import Waits, metrics
from hocket.stream.sizes import parse_bytes

logger = logging.getLogger("hocket.stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """How one stream's shards are fetched and checked; none of it changes what is read."""

    validate_hash: str | None = None
    """The digest to check; None for the quickest one that the index carries."""

    keep_zip: bool = False
    """Keep a downloaded compressed shard beside the raw one."""

    download_timeout: float = DOWNLOAD_TIMEOUT_S
    """Seconds that all tries of one request may take together."""

    download_retry: int = DOWNLOAD_ATTEMPTS
    """Fetches of a shard before wrong bytes are final."""

    def __post_init__(self) -> None:
        settled = {
            "keep_zip": switch("keep_zip", self.keep_zip),
            "download_timeout": seconds("download_timeout", self.download_timeout),
            "download_retry": whole("download_retry", self.download_retry, least=1),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One stream."""

    location: Location
    settings: SourceSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """How far ahead of their use batches are made, and of what."""

    prefetch_bytes: int | str = PREFETCH_BYTES
    """Bytes of shards that may be fetched ahead of their first use, such as `256mb`."""

    prefetch_batches: int = PREFETCH_BATCHES
    """Finished batches that may wait."""

    fetch_threads: int = FETCH_THREADS
    """Shards that are fetched at once."""

    prefetch_next_epoch: bool = True
    """Go on with the next epoch's first shards, within the same bytes."""

    cache_limit: int | str | None = None
    """Bytes that the caches together may have, such as `100gb`; None for no limit."""

    allow_unsafe_types: bool = False
    """Take columns whose decoding runs code out of the data."""

    on_bad_sample: str = "raise"
    """What becomes of a sample that cannot be decoded: `raise` or `replace`."""

    def __post_init__(self) -> None:
        settled: dict[str, object] = {
            name: whole(name, getattr(self, name), least=1) for name in ("prefetch_batches", "fetch_threads")
        }
        settled |= {
            name: switch(name, getattr(self, name)) for name in ("prefetch_next_epoch", "allow_unsafe_types")
        }
        for name in ("prefetch_bytes", "cache_limit"):
            value = getattr(self, name)
            if value is not None:
                settled[name] = parse_bytes(name, value)
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if self.on_bad_sample not in ("raise", "replace"):
            reason = ", which would leave ranks with batches of different sizes"
            raise ConfigError(
                f"`on_bad_sample` is {self.on_bad_sample!r}{reason if self.on_bad_sample == 'skip' else ''}: "
                "expected 'raise' or 'replace'"
            )


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
    """The streams' indexes, and their shards as this process sees them.

    The indexes are safe in a forked child; the caches are made anew there. Pickling keeps neither: the other
    process opens the indexes again and refuses one that has changed meanwhile.
    """

    def __init__(
        self, sources: Sequence[Source], settings: ReadSettings, *, weigh: Callable[[list[int]], list[int]]
    ) -> None:
        self.sources = list(sources)
        self.settings = settings
        self._open()
        self.sizes = [index.num_samples for index in self.indexes]
        """Samples of each stream."""
        self.counts = weigh(self.sizes)
        """Samples that an epoch has of each stream."""
        self.mix = _native.StreamMix(self.indexes, self.counts)
        """Both, as orders are planned from."""

    def _open(self) -> None:
        fetched = [_fetch_index(source) for source in self.sources]
        self.indexes = [
            _parse_index(source, data) for source, (data, _) in zip(self.sources, fetched, strict=True)
        ]
        self._written_ms = [written_ms for _, written_ms in fetched]
        # The first stream with shards says what columns there are.
        full = next((at for at, index in enumerate(self.indexes) if index.num_shards), 0)
        origin = self.sources[full].location.origin
        unsafe = self.settings.allow_unsafe_types
        for source, index in zip(self.sources, self.indexes, strict=True):
            if index.num_shards and index.columns != self.indexes[full].columns:
                raise ConfigError(
                    f"`{source.location.origin}` has the columns {_describe(index)}, and `{origin}` "
                    f"{_describe(self.indexes[full])}: expected the same in all streams of one run"
                )
        mixed = {name for index in self.indexes for name in index.mixed_columns}
        self._columns = ColumnSet(
            self.indexes[full].columns,
            mixed,
            origin=f"{origin.rstrip('/')}/index.json",
            allow_unsafe_types=unsafe,
            loads_images=self.settings.on_bad_sample == "replace",
        )
        self.encodings = self._columns.encodings
        self._own()

    @property
    def origin(self) -> str:
        """What messages call the data."""
        return ", ".join(source.location.origin for source in self.sources[:3]) + (
            f" and {len(self.sources) - 3} more" if len(self.sources) > 3 else ""
        )

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all streams, in their order; one stream's is its own."""
        fingerprints = [index.fingerprint for index in self.indexes]
        return fingerprints[0] if len(fingerprints) == 1 else digest(fingerprints)

    def shard_sizes(self) -> list[list[int]]:
        """Return the samples of each shard, by stream. Reads the indexes again.

        Raises:
            IndexCorruptError: One was written anew meanwhile.
        """
        found = []
        for source, index in zip(self.sources, self.indexes, strict=True):
            data, _ = _fetch_index(source)
            if _parse_index(source, data).fingerprint != index.fingerprint:
                raise IndexCorruptError(
                    f"the data set at `{source.location.origin}` was written anew while it was opened: "
                    "expected one that stays; open it again"
                )
            found.append([shard["samples"] for shard in json.loads(data)["shards"]])
        return found

    def metrics(self) -> dict[str, float]:
        """Return what `StreamingDataset.metrics` says."""
        return metrics(self._caches, self._limit, self._waits, num_replaced=self._stand_ins.num_replaced)

    def _make_caches(self) -> list[_native.ShardCache]:
        self._limit = self._make_limit()
        return [
            _native.ShardCache(
                index,
                source.location.local,
                source.location.remote,
                written_ms=written_ms,
                deadline_s=source.settings.download_timeout,
                keep_zip=source.settings.keep_zip,
                attempts=source.settings.download_retry,
                validate_hash=source.settings.validate_hash,
                limit=self._limit,
            )
            for index, source, written_ms in zip(self.indexes, self.sources, self._written_ms, strict=True)
        ]

    def _make_limit(self) -> _native.CacheLimit | None:
        # What has no remote is the data itself, and under no limit.
        folders: list[tuple[str | os.PathLike[str], _native.ShardIndex]] = [
            (source.location.local, index)
            for index, source in zip(self.indexes, self.sources, strict=True)
            if source.location.remote is not None
        ]
        if self.settings.cache_limit is None:
            return None
        num_bytes = parse_bytes("cache_limit", self.settings.cache_limit)
        return _native.CacheLimit(num_bytes, folders) if folders else None

    def read(
        self,
        order: _native.EpochOrder,
        *,
        rank: int,
        world_size: int,
        first: int,
        stride: int,
        following: _native.EpochOrder | None = None,
    ) -> Iterator[RankBatch]:
        """Yield a rank's part of batches `first`, `first + stride`, …, read ahead by native threads.

        They go on with the first shards of `following`. With `on_bad_sample="replace"` others stand in for
        samples that cannot be decoded.
        """
        self._settle_in()
        if not self.settings.prefetch_next_epoch:
            following = None
        while True:
            reader = self._reader(order, following, rank, world_size, first, stride)
            try:
                for batch in self._take_all(reader):
                    first = batch.number + stride
                    yield batch
                return
            except SampleCorruptError:
                if self.settings.on_bad_sample == "raise":
                    raise
            finally:
                reader.close()
            local, total = order.share(first, rank, world_size)
            columns = self._stand_ins.read(order.rank_ids(first, rank, world_size))
            yield RankBatch(first, local, total, columns)
            first += stride

    def _reader(
        self,
        order: _native.EpochOrder,
        following: _native.EpochOrder | None = None,
        rank: int = 0,
        world_size: int = 1,
        first: int = 0,
        stride: int = 1,
    ) -> _native.BatchReader:
        return _native.BatchReader(
            self._caches,
            order,
            following,
            rank=rank,
            world_size=world_size,
            first=first,
            stride=stride,
            prefetch_bytes=parse_bytes("prefetch_bytes", self.settings.prefetch_bytes),
            prefetch_batches=self.settings.prefetch_batches,
            fetch_threads=self.settings.fetch_threads,
        )

    def _take_all(self, reader: _native.BatchReader) -> Iterator[RankBatch]:
        while True:
            with self._telling():
                batch = self._waits.next(reader)
            if batch is None:
                return
            number, local, total, columns = batch
            yield RankBatch(number, local, total, self._columns.decode(columns, max(local, 1)))

    def look_up(self, numbers: Sequence[int]) -> dict[str, Column]:
        """Return samples by number in storage order, the streams one after the other, as one batch's columns.

        Raises:
            SampleCorruptError: One cannot be decoded.
            ShardNotFoundError: And the others of `StreamingDataset.read_batches`.
        """
        self._settle_in()
        ids = np.array(numbers, np.uint64)
        order = self.mix.listed_order(ids.data, np.array([0, len(ids)], np.uint64).data)
        with self._telling():
            columns = self._waits.look_up(self._caches, order)
        if columns is not None:
            return self._columns.decode(columns, len(ids))
        reader = self._reader(order)
        try:
            (batch,) = self._take_all(reader)
        finally:
            reader.close()
        return batch.columns

    def _settle_in(self) -> None:
        """In a forked child, make anew what is a process's own: the parent's was forked in the middle."""
        if self._process != os.getpid():
            self._own()

    def _own(self) -> None:
        self._caches, self._process, self._waits = self._make_caches(), os.getpid(), Waits()
        self._stand_ins = StandIns(self.look_up, [index.num_samples for index in self.indexes])

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Log what the caches have to say of what was done."""
        try:
            yield
        finally:
            for cache in self._caches:
                for notice in cache.take_notices():
                    logger.warning("%s", notice)

    def __getstate__(self) -> dict[str, Any]:
        fingerprints = [index.fingerprint for index in self.indexes]
        return {
            "sources": self.sources,
            "settings": self.settings,
            "counts": self.counts,
            "fingerprints": fingerprints,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.sources, self.settings = state["sources"], state["settings"]
        self._open()
        for source, index, known in zip(self.sources, self.indexes, state["fingerprints"], strict=True):
            if index.fingerprint != known:
                raise IndexCorruptError(
                    f"the data set at `{source.location.origin}` has fingerprint {index.fingerprint}, and "
                    f"had {known} when this run began: it was written anew; begin the run again"
                )
        self.sizes = [index.num_samples for index in self.indexes]
        self.counts = state["counts"]
        self.mix = _native.StreamMix(self.indexes, self.counts)


def digest(parts: Sequence[object]) -> str:
    """Return 32 hexadecimal digits over numbers and texts."""
    text = json.dumps(list(parts), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _fetch_index(source: Source) -> tuple[bytes, int]:
    """Return a stream's index, and when it was last written."""
    location, deadline_s = source.location, source.settings.download_timeout
    try:
        return _native.load_shard_index(location.local, location.remote, deadline_s=deadline_s)
    except (StorePermissionError, StoreTransientError) as error:
        if location.remote is None:
            raise
        # That there is none is an answer; this is none, and what was kept may be all that is needed.
        kept = _native.load_kept_shard_index(location.local, location.remote, deadline_s=deadline_s)
        if kept is None:
            raise
        logger.warning("%s; the index kept in `%s` is used, and the shards there", error, location.local)
        return kept


def _parse_index(source: Source, data: bytes) -> _native.ShardIndex:
    return _native.ShardIndex.parse(data, f"{source.location.origin.rstrip('/')}/index.json")


def _describe(index: _native.ShardIndex) -> str:
    return ", ".join(f"`{name}: {encoding}`" for name, encoding, _ in index.columns)
