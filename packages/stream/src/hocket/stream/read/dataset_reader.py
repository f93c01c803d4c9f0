"""The reader of a data set: indexes, shard caches and native readers of this process."""

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
from hocket.native.errors import StorePermissionError
from hocket.stream.encodings import Column
from hocket.stream.errors import IndexCorruptError, SampleCorruptError
from hocket.stream.read.bad_samples import SampleReplacer
from hocket.stream.read.columns import ColumnSet
from hocket.stream.read.metrics import WaitCounters, metrics
from hocket.stream.read.stream_source import StreamSource
from hocket.stream.settings.reading import ReadSettings
from hocket.stream.settings.sizes import parse_bytes

logger = logging.getLogger("hocket.stream")

_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of a global batch."""

    number: int
    """Number of the batch in its epoch."""

    local: int
    """Number of samples that count on this rank. If it is 0, `columns` hold one sample, so that the rank can
    run the step."""

    total: int
    """Number of samples that count over all ranks."""

    columns: dict[str, Column]
    """Values by column: an array, or a list if the values differ in size."""

    ids: list[int] | None = None
    """Numbers of the samples in storage order, if a subclass of the data set makes them itself."""


class DatasetReader:
    """The indexes and shard caches of all streams.

    A forked child shares the indexes and makes its own caches. An unpickled reader opens the indexes again
    and raises if one has changed.
    """

    _environment: dict[str, str]

    def __init__(
        self,
        sources: Sequence[StreamSource],
        settings: ReadSettings,
        *,
        weigh: Callable[[list[int]], list[int]],
    ) -> None:
        self.sources = list(sources)
        self.settings = settings
        self._open()
        self.sizes = [index.num_samples for index in self.indexes]
        """Number of samples in each stream."""
        self.counts = weigh(self.sizes)
        """Number of samples of each stream in an epoch."""
        self.mix = _native.StreamMix(self.indexes, self.counts)
        """The streams in the form that native orders take."""

    def _open(self) -> None:
        opened = [source.open() for source in self.sources]
        self.sources = [source for source, *_ in opened]
        fetched = [(data, written_ms) for _, data, written_ms, _ in opened]
        self.notices = [notice for *_, notice in opened if notice is not None]
        """What to tell the user about the data."""
        self.indexes = [
            source.parse_index(data) for source, (data, _) in zip(self.sources, fetched, strict=True)
        ]
        self._written_ms = [written_ms for _, written_ms in fetched]
        columns, mixed = _merge_columns(self.indexes)
        nonempty = [
            source for source, index in zip(self.sources, self.indexes, strict=True) if index.num_shards
        ]
        origin = (nonempty or self.sources)[0].location.origin
        self._columns = ColumnSet(
            columns,
            mixed,
            origin=f"{origin.rstrip('/')}/index.json",
            allow_unsafe_types=self.settings.allow_unsafe_types,
            loads_images=self.settings.on_bad_sample == "replace",
        )
        self.mixed_columns = mixed
        """Names of columns that some shards lack, or have in another encoding."""
        self.encodings = self._columns.encodings
        self._make_process_state()

    @property
    def origin(self) -> str:
        """The name of the data in messages."""
        return ", ".join(source.location.origin for source in self.sources[:3]) + (
            f" and {len(self.sources) - 3} more" if len(self.sources) > 3 else ""
        )

    @property
    def fingerprint(self) -> str:
        """A hash of all streams in order, 32 hexadecimal digits; of one stream, that stream's fingerprint."""
        fingerprints = [index.fingerprint for index in self.indexes]
        return fingerprints[0] if len(fingerprints) == 1 else digest(fingerprints)

    def shard_sizes(self) -> list[list[int]]:
        """Return the number of samples in each shard, by stream. Reads the indexes again.

        Raises:
            IndexCorruptError: An index was replaced since it was opened.
        """
        streams = range(len(self.sources))
        return [[shard["samples"] for shard in self.shards_of(stream)] for stream in streams]

    def shards_of(self, stream: int) -> list[dict[str, Any]]:
        """Return the entries of a stream's shards in its index, which is read again.

        Raises:
            IndexCorruptError: The index was replaced since it was opened.
        """
        source = self.sources[stream]
        data, _ = source.fetch_index()
        if source.parse_index(data).fingerprint != self.indexes[stream].fingerprint:
            raise IndexCorruptError(
                f"the data set at `{source.location.origin}` was rewritten while it was being opened: "
                "open it again after its writer has finished"
            )
        shards: list[dict[str, Any]] = json.loads(data)["shards"]
        return shards

    def metrics(self) -> dict[str, float]:
        """Return the counters; see `StreamingDataset.metrics`."""
        return metrics(self._caches, self._limit, self._waits, num_replaced=self._replacer.num_replaced)

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
                keep_shards=source.settings.keep_shards,
                download_retry=source.settings.download_retry,
                validate_hash=source.settings.validate_hash,
                limit=self._limit,
            )
            for index, source, written_ms in zip(self.indexes, self.sources, self._written_ms, strict=True)
        ]

    def _make_limit(self) -> _native.CacheLimit | None:
        # A folder without a remote is the data itself and not a cache.
        folders: list[tuple[str | os.PathLike[str], _native.ShardIndex]] = [
            (source.location.local, index)
            for index, source in zip(self.indexes, self.sources, strict=True)
            if source.location.remote is not None
        ]
        if self.settings.cache_limit is None:
            return None
        num_bytes = parse_bytes("cache_limit", self.settings.cache_limit)
        if not self.settings.limits_index:
            num_bytes += sum({str(folder): _size_on_disk(folder) for folder, _ in folders}.values())
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
        """Yield a rank's part of batches `first`, `first + stride`, …, which native threads prefetch.

        At the end the threads prefetch the first shards of `following`. With `on_bad_sample="replace"`,
        samples that cannot be decoded are replaced.
        """
        self._renew_after_fork()
        # Shards that are not kept would be gone when the next epoch starts.
        if not (self.settings.prefetch_next_epoch and all(s.settings.keep_shards for s in self.sources)):
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
            except StorePermissionError:
                if not self._reopen_with_new_keys():
                    raise
                continue
            finally:
                reader.close()
            local, total = order.share(first, rank, world_size)
            columns = self._replacer.read(order.rank_ids(first, rank, world_size))
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
            with self._logging_notices():
                batch = self._waits.next(reader)
            if batch is None:
                return
            number, local, total, columns = batch
            yield RankBatch(number, local, total, self._columns.decode(columns, max(local, 1)))

    def look_up(self, numbers: Sequence[int]) -> dict[str, Column]:
        """Return samples by number in storage order, one stream after the other, as the columns of one batch.

        Raises:
            SampleCorruptError: A sample cannot be decoded.
            ShardNotFoundError: As `StreamingDataset.read_batches`, with its other errors.
        """
        return self._retry_with_new_keys(lambda: self._look_up(numbers))

    def fetch_shard(self, number: int) -> None:
        """Fetch the whole shard of a sample into its cache; a lookup may read only a part of the shard.

        Args:
            number: Number of the sample in storage order.

        Raises:
            SampleCorruptError: As `look_up`, with its other errors.
        """
        self._retry_with_new_keys(lambda: self._read_listed(self._listed([number])))

    def _retry_with_new_keys(self, read: Callable[[], dict[str, Column]]) -> dict[str, Column]:
        self._renew_after_fork()
        try:
            return read()
        except StorePermissionError:
            if not self._reopen_with_new_keys():
                raise
            return read()

    def _listed(self, numbers: Sequence[int]) -> _native.EpochOrder:
        """Return an order of one batch that holds these samples."""
        ids = np.array(numbers, np.uint64)
        return self.mix.listed_order(ids.data, np.array([0, len(ids)], np.uint64).data)

    def _look_up(self, numbers: Sequence[int]) -> dict[str, Column]:
        order = self._listed(numbers)
        with self._logging_notices():
            columns = self._waits.look_up(self._caches, order)
        return self._read_listed(order) if columns is None else self._columns.decode(columns, len(numbers))

    def _read_listed(self, order: _native.EpochOrder) -> dict[str, Column]:
        reader = self._reader(order)
        try:
            (batch,) = self._take_all(reader)
        finally:
            reader.close()
        return batch.columns

    def _renew_after_fork(self) -> None:
        """Make new caches in a forked child, because threads of the parent may be using the old ones."""
        if self._process != os.getpid():
            self._make_process_state()

    def _reopen_with_new_keys(self) -> bool:
        """Open the stores again and return True, if the environment was changed since they were opened.

        Keys in the environment are read when a store is opened, and the program may have renewed them.
        """
        if self._environment == dict(os.environ):
            return False
        self._environment = dict(os.environ)
        self._caches = self._make_caches()
        return True

    def _make_process_state(self) -> None:
        self._environment = dict(os.environ)
        self._caches, self._process, self._waits = self._make_caches(), os.getpid(), WaitCounters()
        self._replacer = SampleReplacer(self.look_up, [index.num_samples for index in self.indexes])

    @contextmanager
    def _logging_notices(self) -> Iterator[None]:
        """Log the notices of the caches."""
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
        for source, index, saved in zip(self.sources, self.indexes, state["fingerprints"], strict=True):
            if index.fingerprint != saved:
                raise IndexCorruptError(
                    f"the data set at `{source.location.origin}` has fingerprint {index.fingerprint}, and "
                    f"had {saved} when this run started: the data set was rewritten; restart the run"
                )
        self.sizes = [index.num_samples for index in self.indexes]
        self.counts = state["counts"]
        self.mix = _native.StreamMix(self.indexes, self.counts)


def digest(parts: Sequence[object]) -> str:
    """Return a digest of numbers and strings, as 32 hexadecimal digits."""
    text = json.dumps(list(parts), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _size_on_disk(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that a folder's index takes up as the native limit counts them: whole blocks."""
    status = os.stat(os.path.join(folder, "index.json"))
    return max(512 * status.st_blocks, -(-status.st_size // _BLOCK_BYTES) * _BLOCK_BYTES)


def _merge_columns(
    indexes: Sequence[_native.ShardIndex],
) -> tuple[list[tuple[str, str, int | None]], frozenset[str]]:
    """Return the columns of all indexes, and the names of those that some shards lack.

    A column that is `int` in some shards and `int64` in the others is one of 64-bit integers in all of them.
    """
    # Without shards there are no columns either.
    nonempty = [index for index in indexes if index.num_shards]
    columns = list(dict.fromkeys(column for index in nonempty for column in index.columns))
    within = {name for index in nonempty for name in index.mixed_columns}
    mixed = within | {column[0] for index in nonempty for column in columns if column not in index.columns}
    names = [{column[0] for column in index.columns} for index in nonempty]
    kinds = {name: {kind for other, kind, _ in columns if other == name} for name in mixed - within}
    integers = {name for name, kind in kinds.items() if kind == {"int", "int64"}}
    return columns, frozenset(mixed - {name for name in integers if all(name in own for own in names)})
