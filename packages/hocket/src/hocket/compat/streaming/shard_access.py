"""Access to shards by number: their samples, their streams, and their files in the cache."""

from __future__ import annotations

import itertools
import os
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.compat.streaming.shards import ShardInfo, read_shards
from hocket.stream.errors import ConfigError
from hocket.stream.mosaic.sampling import draw
from hocket.stream.read.dataset_reader import DatasetReader

Numbers = NDArray[np.int64]
_FILES = ("raw_data", "raw_meta", "zip_data", "zip_meta")


class ShardAccess:
    """The shard attributes of mosaicml-streaming's data sets; shards are numbered over all streams in order.

    The first use of `shards` reads the indexes again.
    """

    _reader: DatasetReader
    shuffle: bool
    shuffle_seed: int
    sampling_method: str
    sampling_granularity: int

    @cached_property
    def shards(self) -> list[ShardInfo]:
        """The shards of all streams, in order."""
        places = (source.location for source in self._reader.sources)
        return read_shards(place.remote or str(place.local) for place in places)

    @property
    def num_shards(self) -> int:
        """Number of shards in all streams."""
        return sum(index.num_shards for index in self._reader.indexes)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        return self._reader.shard_sizes()

    @property
    def samples_per_shard(self) -> Numbers:
        """Number of samples in each shard."""
        return np.array(list(itertools.chain.from_iterable(self._sizes)), np.int64)

    @property
    def sample_offset_per_shard(self) -> Numbers:
        """Number of each shard's first sample."""
        return _offsets(self.samples_per_shard)

    @property
    def samples_per_stream(self) -> Numbers:
        """Number of samples in each stream."""
        return np.array(self._reader.sizes, np.int64)

    @property
    def sample_offset_per_stream(self) -> Numbers:
        """Number of each stream's first sample."""
        return _offsets(self.samples_per_stream)

    @property
    def shards_per_stream(self) -> Numbers:
        """Number of shards in each stream."""
        return np.array([len(sizes) for sizes in self._sizes], np.int64)

    @property
    def shard_offset_per_stream(self) -> Numbers:
        """Number of each stream's first shard."""
        return _offsets(self.shards_per_stream)

    @property
    def stream_per_shard(self) -> Numbers:
        """Number of the stream of each shard."""
        return np.repeat(np.arange(len(self._sizes)), self.shards_per_stream)

    @property
    def epoch_seed_change(self) -> bool:
        """Whether each epoch draws other samples of a stream that it uses in part."""
        return self.shuffle and self.sampling_method == "balanced"

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[Numbers, Numbers]:
        """Return the sizes of an epoch's shuffle units, and the samples of all units by number.

        A unit is a whole shard, once per repetition, or the sampled part of a shard.

        Args:
            epoch: The epoch.
            stream_id: The stream; all by default.
        """
        chosen = slice(None) if stream_id is None else slice(stream_id, stream_id + 1)
        units, ids = draw(
            self._sizes[chosen],
            self._reader.counts[chosen],
            seed=self.shuffle_seed,
            epoch=epoch,
            shuffle=self.shuffle,
            sampling_method=self.sampling_method,
            granularity=self.sampling_granularity,
        )
        first = 0 if stream_id is None else self.sample_offset_per_stream[stream_id]
        return np.array(units, np.int64), ids + first

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard into the cache folder, if it is not there.

        Args:
            shard_id: The shard.
            blocking: Has no effect: the call always waits for the shard.

        Raises:
            ShardNotFoundError: The shard does not exist; the other errors of `read_batches` are raised too.
        """
        if self.samples_per_shard[shard_id]:
            self._reader.fetch_shard(int(self.sample_offset_per_shard[shard_id]))

    def evict_shard(self, shard_id: int) -> None:
        """Remove a shard's files from the cache folder; the next reader fetches the shard again.

        Raises:
            ConfigError: The files are the data itself, which has no remote.
        """
        location = self._reader.sources[self.stream_per_shard[shard_id]].location
        if location.remote is None:
            raise ConfigError(
                f"shard {shard_id} is in `{location.local}`, which has no remote: expected a shard that can "
                "be fetched again; give the stream a `remote`, and another folder as `local`"
            )
        for name in _FILES:
            entry = self.shards[shard_id].entry.get(name)
            if entry is not None:
                (location.local / entry["basename"]).unlink(missing_ok=True)

    @property
    def cache_usage(self) -> int:
        """Bytes of the data sets' files in the cache folders, with their indexes."""
        num_bytes = 0
        for source in self._reader.sources:
            for folder, _, names in os.walk(source.location.local):
                num_bytes += sum(os.path.getsize(os.path.join(folder, name)) for name in names)
        return num_bytes


def _offsets(counts: Numbers) -> Numbers:
    offsets: Numbers = counts.cumsum() - counts
    return offsets
