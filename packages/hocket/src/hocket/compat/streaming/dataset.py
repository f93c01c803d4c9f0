"""`StreamingDataset` with mosaicml-streaming's arguments and its order of samples."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.utils.data

from hocket.stream import Stream
from hocket.stream import StreamingDataset as _StreamingDataset
from hocket.stream.engine import RankBatch
from hocket.stream.errors import ConfigError
from hocket.stream.samples import SampleIterator

_MOST_WORKERS = 1024
_MOST_AHEAD = 8

#: What mosaicml-streaming's data sets have and these have not, and why.
_ABSENT = {
    "cache_usage": "the cache folder's files are counted as they are; `metrics()` says what was fetched",
    "evict_coldest_shard": "`cache_limit` evicts by itself",
    "evict_shard": "`cache_limit` evicts by itself",
    "get_item": "ask with `dataset[number]`",
    "prepare_shard": "shards are fetched ahead by themselves, and by `dataset[number]`",
    "resample_streams": "each epoch draws its samples by itself",
    "sample_offset_per_shard": "ask for samples by number: `dataset[number]`",
    "samples_per_shard": "`hocket-stream inspect` shows each shard",
    "shard_offset_per_stream": "ask for samples by number: `dataset[number]`",
    "shards": "`hocket-stream inspect` shows each one; `num_shards` is their number",
    "shards_per_stream": "`hocket-stream inspect` shows each stream's",
    "spanner": "ask for samples by number: `dataset[number]`",
    "stream_per_shard": "ask for samples by number: `dataset[number]`",
}
_TURN = struct.Struct("I")


class StreamingDataset(_StreamingDataset):
    """A data set of MDS, JSON or XSV shards in mosaicml-streaming's order, for any torch `DataLoader`.

    Arguments are mosaicml-streaming's, and mean what they mean there and in `hocket.stream.StreamingDataset`,
    but for these:

    Args:
        predownload: Samples ahead, rounded up to whole batches of `batch_size`, which it needs, and at most 8
            of them: what is fetched further ahead are shards, as far as memory of 256 MiB allows.
        batching_method: `random`, `stratified` or `per_stream`; `device_per_stream` comes later.
        stream_name: `stream`: there is no registry of other classes.
        stream_config: Arguments of the one `Stream`, beside `remote`, `local` and `split`.

    Raises:
        ConfigError: An argument does not work, or has no counterpart here.
        IndexNotFoundError: There is no data set.
        IndexCorruptError: Its index cannot be trusted.
        StoreError: The store's own errors, as they come.
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
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
        if stream_name != "stream":
            raise ConfigError(
                f"`stream_name` is {stream_name!r}: expected 'stream'; there is no registry of other "
                "classes, give `streams`"
            )
        ahead: dict[str, Any] = {}
        if predownload is not None:
            if batch_size is None or predownload < 0:
                raise ConfigError(
                    f"`predownload` is {predownload} and `batch_size` {batch_size}: expected samples from 0, "
                    "beside the size of a batch"
                )
            ahead["prefetch_batches"] = min(max(-(-predownload // batch_size), 1), _MOST_AHEAD)
        if stream_config:
            if streams is not None:
                raise ConfigError("`stream_config` is given beside `streams`: expected it in the streams")
            streams = [Stream(**{"remote": remote, "local": local, "split": split} | dict(stream_config))]
            remote = local = split = None
        super().__init__(
            streams=streams,
            remote=remote,
            local=local,
            split=split,
            epoch_size=epoch_size,
            batch_size=batch_size,
            batching_method=batching_method,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            num_canonical_nodes=num_canonical_nodes,
            order="mosaic",
            shuffle_algo=shuffle_algo,
            partition_algo=partition_algo,
            validate_hash=validate_hash,
            keep_zip=keep_zip,
            cache_limit=cache_limit,
            replication=replication,
            allow_unsafe_types=allow_unsafe_types,
            download_timeout=download_timeout,
            download_retry=download_retry,
            **ahead,
        )
        self.streams = [Stream(remote=remote, local=local, split=split)] if streams is None else list(streams)
        self.num_streams = len(self.streams)
        self.predownload = predownload
        self.cache_limit = cache_limit
        self.sampling_method = sampling_method
        self.sampling_granularity = sampling_granularity
        self.partition_algo = partition_algo
        self.num_canonical_nodes = num_canonical_nodes
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.shuffle_algo = shuffle_algo
        self.shuffle_seed = shuffle_seed
        self.shuffle_block_size = shuffle_block_size
        self.batching_method = batching_method
        self.allow_unsafe_types = allow_unsafe_types
        self.replication = replication
        self._turns = _Turns()
        self._begun: tuple[int, int] | None = None
        self._loaded = (0, 0)
        self._is_told = False
        self._numbers: list[int] = []
        self._ready: tuple[int, dict[str, Any]] | None = None

    def __iter__(self) -> SampleIterator:
        """Return this rank's samples, each iteration those of the next epoch, in workers too.

        A subclass that overrides `__getitem__` has it called for each sample.

        Raises:
            ConfigError: In a plain `DataLoader`'s worker that was not forked: it cannot know the epoch.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and not self._is_told:
            # The workers of a plain loader are copies of a data set that hears nothing of their epochs.
            if self._begun is None:
                self._begun = (self.cursor.epoch, self.cursor.batch)
            turn = self._turns.take(worker.id)
            epoch, batch = self._begun
            self.cursor.go(epoch + turn, 0 if turn else batch)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        """Return a sample, or a list of them; see `hocket.stream.StreamingDataset`."""
        if self._ready is not None and self._ready[0] == at:
            return self._ready[1]
        return super().__getitem__(at)

    def read_batches(
        self, *, epoch: int, first: int = 0, stride: int = 1, start: int | None = None
    ) -> Iterator[RankBatch]:
        """Yield this rank's part of an epoch's batches; see `hocket.stream.StreamingDataset`."""
        way = self.plan.passes(epoch, first if start is None else start)
        is_plain = type(self).__getitem__ is StreamingDataset.__getitem__
        for batch in self._read_pass(way, first=first, stride=stride):
            if not is_plain:
                self._numbers = way.order.sample_ids(batch.number - way.start)
            yield batch

    def samples(self, batch: RankBatch) -> list[dict[str, Any]]:
        """Return a batch's samples, as a subclass's own `__getitem__` has them."""
        found = super().samples(batch)
        if type(self).__getitem__ is StreamingDataset.__getitem__:
            return found
        made = []
        for number, sample in zip(self._numbers, found, strict=True):
            self._ready = (number, sample)
            made.append(self[number])
        self._ready = None
        return made

    def __getattr__(self, name: str) -> Any:
        # Only what is nowhere else comes here.
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"this data set has no `{name}`{reason}", name=name, obj=self)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, which the next iteration is of.

        Raises:
            ConfigError: `epoch` is below 0.
        """
        super().set_epoch(epoch)
        self._turns.clear()

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = False) -> dict[str, Any]:
        """Return the position: after the batch just yielded, or `num_samples` of all ranks further on.

        Args:
            num_samples: Samples over all ranks since the latest state was loaded, or the epoch began.
            from_beginning: They count from the epoch's beginning in any case.
        """
        state = super().state_dict()
        if num_samples is None:
            return state
        epoch, begun = self.cursor.epoch + max(self._turns.count - 1, 0), 0
        if not from_beginning and self._loaded[0] == epoch:
            begun = self._loaded[1]
        return state | {"epoch": epoch, "sample_in_epoch": begun + num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, here or there.

        Raises:
            StateMismatchError: It has another seed, or other canonical nodes; the message names the field.
            ConfigError: It is no state of this kind.
        """
        super().load_state_dict(state)
        self._loaded = (self.cursor.epoch, state["sample_in_epoch"])
        self.num_canonical_nodes = state["num_canonical_nodes"]
        self._turns.clear()

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration is of."""
        return self.cursor.epoch + self._turns.count

    @property
    def num_shards(self) -> int:
        """Shards of all streams."""
        return sum(index.num_shards for index in self._engine.indexes)

    @property
    def num_samples(self) -> int:
        """Samples of all streams."""
        return self.size


class _Turns:
    """How often each worker number began an iteration, in memory that forks share with their parent."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self._is_shared = is_shared
        self._memory = mmap.mmap(-1, _TURN.size * _MOST_WORKERS)

    def take(self, worker: int) -> int:
        """Return how often this worker began before, and count one more.

        Raises:
            ConfigError: The parent's memory is not this process's.
        """
        if not self._is_shared:
            raise ConfigError(
                "a worker of a plain DataLoader was not forked, so it cannot know which epoch it is: "
                "expected `StreamingDataLoader`, or `multiprocessing_context='fork'`"
            )
        turn = int(_TURN.unpack_from(self._memory, worker * _TURN.size)[0])
        _TURN.pack_into(self._memory, worker * _TURN.size, turn + 1)
        return turn

    def clear(self) -> None:
        """Forget all: the parent has said where to go on."""
        self._memory[:] = bytes(len(self._memory))

    @property
    def count(self) -> int:
        """How often the workers began."""
        return int(_TURN.unpack_from(self._memory, 0)[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _unshared_turns, ()


def _unshared_turns() -> _Turns:
    return _Turns(is_shared=False)
