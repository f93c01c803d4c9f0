"""Reading data sets, batch by batch, in an order that no topology changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hocket.stream.arguments import whole
from hocket.stream.beginnings import Beginnings
from hocket.stream.defaults import (
    DOWNLOAD_ATTEMPTS,
    DOWNLOAD_TIMEOUT_S,
    FETCH_THREADS,
    PREFETCH_BATCHES,
    PREFETCH_BYTES,
    SHUFFLE_SEED,
)
from hocket.stream.engine import Engine, RankBatch, ReadSettings, SourceSettings
from hocket.stream.errors import ConfigError
from hocket.stream.lookup import Numbers, find_samples, split_batch
from hocket.stream.options import OrderOptions
from hocket.stream.plan import Pass, Plan
from hocket.stream.position import Cursor
from hocket.stream.samples import SampleIterator
from hocket.stream.streams import Stream, choose_streams, resolve_sources
from hocket.stream.topology import (
    offer_to_torch,
    resolve_data_parallel,
    resolve_num_nodes,
    resolve_worker,
)

logger = logging.getLogger("hocket.stream")


class StreamingDataset:
    """Data sets of MDS shards, in a store or on disk, as one stream of global batches.

    Global batch `k` of an epoch is the same list of samples in the same order on any number of ranks and
    workers; each rank reads its contiguous slice of it. A saved position goes on from there on any other
    number. Nothing is negotiated: no collective, no shared memory, no lock that outlives its process.

    A plain torch `DataLoader` takes it as an `IterableDataset`, if torch was imported before it was made.

    Args:
        streams: What to mix, in place of `remote`, `local` and `split`.
        remote: The data set's folder: a URI, or a path, which is read in place unless `local` differs.
        local: The cache folder, which may be shared by all processes of a machine; or, without `remote`, the
            data set itself. Compressed shards are unpacked into it.
        split: A folder within both.
        epoch_size: Samples of an epoch, such as 100000 or `100k` (powers of 1,000); by default each sample
            once, or what the streams' weights say.
        batch_size: Samples of a batch on each rank. This or `global_batch_size`.
        global_batch_size: Samples of a batch over all ranks; it need not be divisible by them.
        batching_method: How streams come together. `random`: shuffled as one. `stratified`: all batches have
            the same number of samples of each stream, by largest remainder; the epoch ends with the first
            stream that ends. `per_stream`: each batch is of one stream, and the streams take turns.
        sampling_method: Where an epoch has a part of a stream: `balanced` draws it anew each epoch if
            shuffling, `fixed` is always the same part.
        sampling_granularity: Samples drawn from one shard at a time: the more, the fewer shards to fetch.
        shuffle: Permute shards, and samples within blocks, anew each epoch. False: the order of storage.
        shuffle_seed: Of the permutations and draws, from 0 to below 2^64.
        shuffle_block_size: Samples of a block; 262,144 by default.
        num_canonical_nodes: Lanes that each batch is drawn from, a divisor of the batch: a machine reads only
            its own lanes' shards where the number of machines divides it. Default: gcd(batch, 64), and
            without shuffling 1, which is the order of storage.
        tail: The last batch of an epoch: `short`; `drop` it; `pad` it with the epoch's first samples.
        order: `native`, or `mosaic`: the samples, batches and states of mosaicml-streaming, whose runs can go
            on here and whose defaults then hold for `shuffle_block_size` and `num_canonical_nodes`. Machines
            (from `LOCAL_WORLD_SIZE`) have a part in it, and planning costs time and memory for each sample.
        shuffle_algo: `naive`, `py1s`, `py2s`, `py1br` or `py1e` (the default), of `order="mosaic"`, which it
            implies; so does `partition_algo`: `orig` or `relaxed` (the default).
        validate_hash: The digest to check; by default the quickest one that the index carries. Shards are
            checked when they arrive, and when a process first opens one that was there.
        keep_zip: Keep downloaded compressed shards beside the raw ones.
        cache_limit: Bytes that the cache folders together may have, such as `100gb` (powers of 1,024); give
            all processes of a machine the same. The shard used longest ago goes first, and none in use; one
            without room is held in memory while batches need it. What has no remote is never removed.
        rank: Data-parallel rank; by default `RANK` divided by `replication`.
        world_size: Number of those; by default `WORLD_SIZE` divided by `replication`.
        replication: So many consecutive processes read the same samples.
        allow_unsafe_types: Take columns whose decoding runs code out of the data.
        on_bad_sample: What becomes of a sample that cannot be decoded while its shard is sound: `raise`, or
            `replace` it by the next good one of its stream in storage order, the same on any topology; images
            are then decoded here, and not where their pixels are first asked for.
        download_timeout: Seconds that all tries of one request may take together, plus one for each MiB.
        download_retry: Fetches of a shard before wrong bytes are final.
        prefetch_bytes: Bytes of shards fetched ahead of their first use, such as `256mb`.
        prefetch_batches: Finished batches that may wait.
        prefetch_next_epoch: Go on with the next epoch's first shards while the last batches of this one are
            taken, within the same bytes; not with `order="mosaic"`, whose plans are costly, nor where shards
            find no room in the cache.
        fetch_threads: Shards fetched at once.

    Raises:
        ConfigError: An argument does not work, or there are more ranks than samples.
        IndexNotFoundError: There is no data set.
        IndexCorruptError: Its index cannot be trusted.
        StoreError: The store's own errors, as they come.

    Example:
        >>> dataset = StreamingDataset(remote="s3://bucket/train", batch_size=32, shuffle=True)
        >>> for batch in dataset.batches():
        ...     batch["tokens"]  # (32, 1024) uint16
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        epoch_size: int | str | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        batching_method: str = "random",
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        shuffle: bool = False,
        shuffle_seed: int = SHUFFLE_SEED,
        shuffle_block_size: int | None = None,
        num_canonical_nodes: int | None = None,
        tail: str = "short",
        order: str | None = None,
        shuffle_algo: str | None = None,
        partition_algo: str | None = None,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        cache_limit: int | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        replication: int | None = None,
        allow_unsafe_types: bool = False,
        on_bad_sample: str = "raise",
        download_timeout: float = DOWNLOAD_TIMEOUT_S,
        download_retry: int = DOWNLOAD_ATTEMPTS,
        prefetch_bytes: int | str = PREFETCH_BYTES,
        prefetch_batches: int = PREFETCH_BATCHES,
        prefetch_next_epoch: bool = True,
        fetch_threads: int = FETCH_THREADS,
    ) -> None:
        self._options = OrderOptions(
            order=order,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            shuffle_algo=shuffle_algo,
            partition_algo=partition_algo,
            num_canonical_nodes=num_canonical_nodes,
            tail=tail,
            batching_method=batching_method,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            epoch_size=epoch_size,
        )
        self.data_parallel = resolve_data_parallel(rank, world_size, replication=replication)
        """This process's data-parallel (rank, number of ranks)."""
        self.cursor = Cursor()
        """Where the iteration is; moved by `batches`, by iterating, and by the loader."""
        self._num_nodes = resolve_num_nodes(
            self.data_parallel[1], is_given=rank is not None, replication=replication
        )
        self._beginnings = Beginnings()
        self._is_tail_reported = False
        fetching = SourceSettings(
            validate_hash=validate_hash,
            keep_zip=keep_zip,
            download_timeout=download_timeout,
            download_retry=download_retry,
        )
        reading = ReadSettings(
            prefetch_bytes=prefetch_bytes,
            prefetch_batches=prefetch_batches,
            prefetch_next_epoch=prefetch_next_epoch,
            fetch_threads=fetch_threads,
            cache_limit=cache_limit,
            allow_unsafe_types=allow_unsafe_types,
            on_bad_sample=on_bad_sample,
        )
        self._streams = choose_streams(streams, remote, local, split)
        self._engine = Engine(
            resolve_sources(self._streams, fetching),
            reading,
            weigh=lambda sizes: self._options.counts(self._streams, sizes),
        )
        self._plan: Plan | None = None
        self._global_batch_size: int | None = None
        self._check_size()
        self._is_known_to_torch = offer_to_torch(type(self))
        if batch_size is not None or global_batch_size is not None:
            self.set_batch_size(batch_size, global_batch_size=global_batch_size)

    def _check_size(self) -> None:
        world_size = self.data_parallel[1]
        if self.epoch_size < world_size:
            raise ConfigError(
                f"an epoch of the data set at `{self._engine.origin}` has {self.epoch_size} samples for "
                f"{world_size} data-parallel ranks: expected at least one for each; use fewer ranks or "
                "more data"
            )

    def set_batch_size(self, batch_size: int | None = None, *, global_batch_size: int | None = None) -> None:
        """Set the size of batches, once. The loader calls it with its own `batch_size`.

        Args:
            batch_size: Samples on each rank.
            global_batch_size: Samples over all ranks.

        Raises:
            ConfigError: Both or neither are given, the batch is smaller than the number of ranks, the lanes
                do not divide it, it has no room for a stream, `drop` leaves nothing of the data, or another
                size was set before.
        """
        world_size = self.data_parallel[1]
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigError(
                f"`batch_size` is {batch_size} and `global_batch_size` {global_batch_size}: "
                "expected one of them"
            )
        if batch_size is not None:
            size = whole("batch_size", batch_size) * world_size
        else:
            size = whole("global_batch_size", global_batch_size)
        if size < max(world_size, 1):
            raise ConfigError(
                f"the global batch is {size} samples for {world_size} data-parallel ranks: expected at least "
                "one for each; make it larger or use fewer ranks"
            )
        if self._global_batch_size not in (None, size):
            raise ConfigError(
                f"the global batch is {size} samples, and was set to {self._global_batch_size} "
                "before: expected one size; give it to the data set or to the loader, not to both"
            )
        if self._plan is None:
            self._plan = self._options.plan(
                self._engine,
                self._streams,
                self.data_parallel,
                global_batch_size=size,
                num_nodes=self._num_nodes,
            )
        self._global_batch_size = size

    @property
    def plan(self) -> Plan:
        """The order of samples.

        Raises:
            ConfigError: No batch size was set yet.
        """
        if self._plan is None:
            raise ConfigError("no batch size is set: give `batch_size` or `global_batch_size`")
        return self._plan

    @property
    def size(self) -> int:
        """Samples of all streams, whatever an epoch has of them."""
        return sum(self._engine.sizes)

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch."""
        return sum(self._engine.counts)

    @property
    def stream_counts(self) -> list[int]:
        """Samples that an epoch has of each stream."""
        return list(self._engine.counts)

    @property
    def num_batches(self) -> int:
        """Batches of the current epoch, the same on every rank."""
        return self.plan.num_batches(self.cursor.epoch)

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in an epoch."""
        return self.plan.num_local_samples(self.cursor.epoch)

    def sample_ids(self, batch: int, *, epoch: int | None = None) -> list[int]:
        """Return the samples of a global batch, in order, by their numbers in storage order.

        Streams are numbered one after the other. Reads nothing. `epoch` is the current one by default.

        Raises:
            IndexError: The epoch has no such batch.
        """
        return self.plan.batch_ids(self.cursor.epoch if epoch is None else epoch, batch)

    def read_batches(
        self, *, epoch: int, first: int = 0, stride: int = 1, start: int | None = None
    ) -> Iterator[RankBatch]:
        """Yield this rank's part of batches `first`, `first + stride`, … of an epoch; the cursor stays.

        Several readers that share the batches of one iteration also say where that one starts.

        Raises:
            ShardNotFoundError: A shard is nowhere.
            ShardCorruptError: Its bytes are wrong, however often fetched.
            SampleCorruptError: A sample cannot be decoded, and nothing may stand in for it.
            StreamIOError: The cache folder refuses.
            StoreError: The store's own errors, as they come.
        """
        way = self.plan.passes(epoch, first if start is None else start)
        yield from self._read_pass(way, first=first, stride=stride)

    def _read_pass(self, way: Pass, *, first: int, stride: int) -> Iterator[RankBatch]:
        batches = self._engine.read(
            way.order,
            rank=way.rank,
            world_size=way.world_size,
            first=first - way.start,
            stride=stride,
            following=way.following,
        )
        for batch in batches:
            local, total = batch.local, batch.total
            if way.shares is not None:
                local, total = way.shares[batch.number].tolist()
            yield RankBatch(batch.number + way.start, local, total, batch.columns)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's batches from the cursor to the end of the epoch, then move to the next epoch.

        Values by column: one writable array, or a list where values differ in size. At the end of an epoch
        it yields nothing. A rank without a share of a short last batch gets one sample, of share 0.

        Raises:
            As `read_batches`.
        """
        self.begin_pass()
        token = self.cursor.begin()
        for batch in self.read_batches(epoch=self.cursor.epoch, first=self.cursor.batch):
            self.cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
            yield batch.columns
        self.cursor.end_epoch(token)

    def __iter__(self) -> SampleIterator:
        """Return this rank's samples, each a value by column. Samples that do not count are left out.

        In a torch DataLoader's worker: those of the worker's batches. The state stands after a batch once its
        last sample was yielded, and before it until then.
        """
        self.begin_pass()
        worker = resolve_worker()
        # Worker 0 speaks for all; without shuffling one epoch is like the other.
        is_seen = worker is not None and worker[0] == 0 and self._options.shuffle
        if is_seen and self._beginnings.is_again(self.cursor.epoch):
            logger.warning(
                "epoch %d is given once more, from its beginning, as a DataLoader's workers do not hear of "
                "the one before; call `set_epoch` before each epoch, or use `StreamingDataLoader`",
                self.cursor.epoch,
            )
        return SampleIterator(self.read_batches, self.samples, self.cursor, worker)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice | list[int] | NDArray[np.integer[Any]]) -> list[dict[str, Any]]: ...
    def __getitem__(self, at: Numbers) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample, or a list of them, by number in storage order, the streams one after the other.

        Negative numbers count from the end. No order, rank or cursor has a part in it.

        Raises:
            IndexError: There is no such sample.
            TypeError: `at` is no integer, slice, list of integers or array of them, as a mask is not.
            ShardNotFoundError: And the others of `read_batches`.
        """
        found = find_samples(self._engine, at)
        return found[0] if isinstance(at, (int, np.integer)) else found

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Return samples as torch's map-style fetchers ask for them.

        Raises:
            ConfigError: torch was imported after this data set was made, and did not see what it is.
        """
        if not self._is_known_to_torch:
            raise ConfigError(
                "this data set was made before torch was imported, so a DataLoader takes it for one that "
                "knows no ranks: expected torch first; import torch before making the data set"
            )
        return self[numbers]

    def samples(self, batch: RankBatch) -> list[dict[str, Any]]:
        """Return a batch's samples, each a value by column; one that does not count among them."""
        return split_batch(self._engine, batch)

    def batch_share(self) -> tuple[int, int]:
        """Return how many samples of the batch just yielded count here, and over all ranks."""
        return self.cursor.share

    def metrics(self) -> dict[str, float]:
        """Return what reading did in this process since the data set was made, by names that loggers take.

        `stream/batches` were taken, and `stream/wait_s` seconds spent waiting for them; `stream/queue_depth`
        were ready when the last one was asked for. `stream/cache_hits` files of shards were there when they
        were opened; `stream/fetches` came from the remote, of `stream/fetched_bytes` bytes, by
        `stream/requests`, of which `stream/retries` were made again after a failure; `stream/passed` found no
        room and were held in memory; `stream/evicted` made room; `stream/replaced` samples could not be
        decoded, and others stood in for them. Worker processes count for themselves.
        """
        return self._engine.metrics()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch.

        A plain torch DataLoader with workers needs it before each epoch: its workers are copies that end with
        the epoch, and this object hears nothing of it.

        Raises:
            ConfigError: `epoch` is no integer from 0.
        """
        self.cursor.go(whole("epoch", epoch), 0)
        self._beginnings.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch just yielded: JSON, below 1 KB, of no topology.

        With `order="mosaic"` it is mosaicml-streaming's own.
        """
        return self.plan.state(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on whatever number of ranks and workers.

        Raises:
            StateMismatchError: It is of other data, or of another order; the message names the field.
            ConfigError: It is no state of this kind.
        """
        self.plan.load(state, self.cursor)
        self._beginnings.forget()

    def begin_pass(self) -> None:
        """Get ready for an iteration, which `batches`, `__iter__` and the loader do by themselves.

        After one that gave all batches of its epoch it is of the next epoch, even if the consumer stopped at
        the last batch and never asked for more. Says once, on rank 0, what the last batch does to this data.
        """
        if self.cursor.is_spent(self.num_batches):
            self.cursor.go(self.cursor.epoch + 1, 0)
        if self._is_tail_reported or self.data_parallel[0] != 0:
            return
        self._is_tail_reported = True
        for level, message in self.plan.notices():
            logger.log(level, "%s", message)
