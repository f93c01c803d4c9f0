"""`StreamingDataset` with mosaicml-streaming's arguments and its order of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.compat.streaming.errors import worded
from hocket.compat.streaming.shard_access import ShardAccess
from hocket.compat.streaming.stream import Stream, streams_registry, to_core
from hocket.stream import MosaicOrder
from hocket.stream import Stream as CoreStream
from hocket.stream import StreamingDataset as _StreamingDataset
from hocket.stream.errors import ConfigError
from hocket.stream.read.dataset_reader import RankBatch
from hocket.stream.read.sample_order import SampleOrder

_MOST_AHEAD = 8

#: Attributes of mosaicml-streaming's data sets that do not exist here, and their replacements.
_ABSENT = {
    "evict_coldest_shard": "`cache_limit` evicts automatically",
    "get_item": "use `dataset[number]`",
    "spanner": "read samples by number: `dataset[number]`",
}


class StreamingDataset(ShardAccess, _StreamingDataset):
    """A data set of MDS, JSON or XSV shards in mosaicml-streaming's order, for any torch `DataLoader`.

    Arguments are those of mosaicml-streaming, with the meaning that they have there and in
    `hocket.stream.StreamingDataset`, except for these:

    Args:
        predownload: Number of samples to prefetch, rounded up to batches of `batch_size`, which is
            required, and limited to 8 batches. Shards are prefetched further ahead, up to 256 MiB.
        batching_method: `random`, `stratified`, `per_stream` or `device_per_stream`.
        stream_name: Name of the class of the stream in `streams_registry`, if `streams` is not given.
        stream_config: Arguments of that class, beside `remote`, `local` and `split`.

    Raises:
        ConfigError: An argument is not valid, or not supported. A batch size that does not fit the data is
            refused by the first iteration, so that samples can be read by number without one.
        IndexNotFoundError: There is no index.
        IndexCorruptError: The index is not valid.
        StoreError: The object store failed.
    """

    _limits_index = False
    _refused: ConfigError | None = None

    def __init__(
        self,
        *,
        streams: Sequence[Stream | CoreStream] | None = None,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | str | None = None,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: Mapping[str, Any] | None = None,
    ) -> None:
        ahead = _prefetch(predownload, batch_size)
        self.streams = _choose_streams(
            streams, {"remote": remote, "local": local, "split": split}, stream_name, stream_config
        )
        with worded(is_local=all(stream.remote is None for stream in self.streams)):
            super().__init__(
                streams=to_core(self.streams),
                epoch_size=epoch_size,
                batch_size=batch_size,
                batching_method=batching_method,
                sampling_method=sampling_method,
                sampling_granularity=sampling_granularity,
                shuffle=shuffle,
                shuffle_seed=shuffle_seed,
                shuffle_block_size=shuffle_block_size,
                num_canonical_nodes=num_canonical_nodes,
                order=MosaicOrder(shuffle_algo=shuffle_algo, partition_algo=partition_algo),
                validate_hash=validate_hash,
                keep_zip=keep_zip,
                cache_limit=cache_limit,
                replication=replication,
                allow_unsafe_types=allow_unsafe_types,
                download_timeout=download_timeout,
                download_retry=download_retry,
                **ahead,
            )
        self._fill_streams()
        self.num_streams = len(self.streams)
        self.predownload = predownload
        self.cache_limit = cache_limit
        self.sampling_method = sampling_method
        self.sampling_granularity = sampling_granularity
        self.partition_algo = partition_algo
        self.num_canonical_nodes = num_canonical_nodes
        self.initial_physical_nodes: int | None = None
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.shuffle_algo = shuffle_algo
        self.shuffle_seed = shuffle_seed
        self.shuffle_block_size = shuffle_block_size
        self.batching_method = batching_method
        self.allow_unsafe_types = allow_unsafe_types
        self.replication = replication
        self._loaded = (0, 0)

    def _fill_streams(self) -> None:
        """Give the streams the values that mosaicml-streaming computes for them."""
        for stream, source, count, size in zip(
            self.streams, self._reader.sources, self._reader.counts, self._reader.sizes, strict=True
        ):
            if isinstance(stream, Stream):
                stream.fill(local=str(source.location.local), count=count, size=size, total=self.epoch_size)

    def set_batch_size(self, batch_size: int | None = None, *, global_batch_size: int | None = None) -> None:
        """Set the batch size; see `hocket.stream.StreamingDataset`. `plan` raises for an invalid size.

        A valid size replaces one that was refused before.
        """
        try:
            super().set_batch_size(batch_size, global_batch_size=global_batch_size)
            self._refused = None
        except ConfigError as error:
            # Kept without its traceback, which would keep this object alive.
            self._refused = error.with_traceback(None)

    @property
    def plan(self) -> SampleOrder:
        """The order of samples.

        Raises:
            ConfigError: No batch size has been set, or it does not fit the data.
        """
        with worded():
            if self._refused is not None:
                raise self._refused
            return super().plan

    def _split(self, batch: RankBatch) -> list[dict[str, Any]]:
        """Return the samples of a batch. If streams differ in columns, each has those of its own stream."""
        return [self._without_absent(sample) for sample in super()._split(batch)]

    def _without_absent(self, sample: dict[str, Any]) -> dict[str, Any]:
        mixed = self._reader.mixed_columns
        if not mixed:
            return sample
        return {name: value for name, value in sample.items() if name not in mixed or value is not None}

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that are not found otherwise.
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"this data set has no `{name}`{reason}", name=name, obj=self)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = False) -> dict[str, Any]:
        """Return the position after the last yielded batch, or after `num_samples` samples of all ranks.

        Args:
            num_samples: Samples over all ranks since the latest state was loaded, or the epoch began.
            from_beginning: Whether `num_samples` counts from the epoch's beginning in any case.
        """
        state = super().state_dict()
        if num_samples is None:
            return state
        starts = self.cursor.starts
        epoch, offset = starts.next_position()[0] - starts.is_begun, 0
        if not from_beginning and self._loaded[0] == epoch:
            offset = self._loaded[1]
        return state | {"epoch": epoch, "sample_in_epoch": offset + num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state of this class or of mosaicml-streaming.

        Raises:
            StateMismatchError: The seed or the canonical nodes differ; the message names the field.
            ConfigError: `state` is not a state of this kind.
        """
        super().load_state_dict(state)
        self._loaded = (self.cursor.epoch, state["sample_in_epoch"])
        self.num_canonical_nodes = state["num_canonical_nodes"]
        self.initial_physical_nodes = state["initial_physical_nodes"]

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.cursor.starts.next_position()[0]

    @property
    def num_samples(self) -> int:
        """Number of samples in all streams."""
        return self.size


def _prefetch(predownload: int | None, batch_size: int | None) -> dict[str, Any]:
    """Return `prefetch_batches` for a number of samples; none for the default."""
    if predownload is None:
        return {}
    if batch_size is None or predownload < 0:
        raise ConfigError(
            f"`predownload` is {predownload} and `batch_size` {batch_size}: expected samples from 0, "
            "beside the size of a batch"
        )
    return {"prefetch_batches": min(max(-(-predownload // batch_size), 1), _MOST_AHEAD)}


def _choose_streams(
    streams: Sequence[Stream | CoreStream] | None,
    place: dict[str, str | None],
    stream_name: str,
    stream_config: Mapping[str, Any] | None,
) -> list[Stream | CoreStream]:
    """Return the given streams, or the one stream of class `stream_name` at `place`."""
    make_stream = streams_registry.get(stream_name)
    given = [name for name, value in place.items() if value is not None]
    if streams and given:
        raise ConfigError(f"`streams` is given beside {given}: expected one of them")
    if streams and stream_config:
        raise ConfigError("`stream_config` is given beside `streams`: expected it in the streams")
    # Configurations of clients pass an empty list beside `remote` and `local`.
    return list(streams) if streams else [make_stream(**place | dict(stream_config or {}))]
