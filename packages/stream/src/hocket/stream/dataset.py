"""`StreamingDataset`: reads data sets in a global order that does not depend on the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from hocket.stream.errors import ConfigError
from hocket.stream.mosaic import MosaicOrder, choose_order
from hocket.stream.options import OrderOptions
from hocket.stream.read.cursor import Cursor
from hocket.stream.read.dataset_reader import DatasetReader, RankBatch, digest
from hocket.stream.read.lookup import SampleLookup
from hocket.stream.read.sample_order import MixedSampleOrder, NativeSampleOrder, SampleOrder, log_notices
from hocket.stream.read.samples import SampleIterator
from hocket.stream.read.streams import Stream, choose_streams, resolve_sources
from hocket.stream.settings.batch_size import check_epoch_size, check_one_size, resolve_global_batch_size
from hocket.stream.settings.defaults import (
    DOWNLOAD_RETRY,
    DOWNLOAD_TIMEOUT_S,
    FETCH_THREADS,
    PREFETCH_BATCHES,
    PREFETCH_BYTES,
    SHUFFLE_SEED,
)
from hocket.stream.settings.double_division import check_divided_once
from hocket.stream.settings.mix_schedule import MixSchedule, Weights, parse_start
from hocket.stream.settings.reading import ReadSettings, SourceSettings
from hocket.stream.settings.row_filter import Filters
from hocket.stream.settings.topology import (
    LoaderWorker,
    agree_over_ranks,
    register_with_torch,
    resolve_data_parallel,
    resolve_num_nodes,
    resolve_worker,
)
from hocket.stream.settings.validation import refuse_foreign, whole


class StreamingDataset(SampleLookup):
    """One or several data sets of MDS, JSON or CSV shards, read as a sequence of global batches.

    Global batch `k` of an epoch is the same list of samples in the same order on any number of ranks and
    workers; each rank reads a contiguous slice of it. A saved state continues on any other number. There
    are no collectives, no named shared memory, and no lock that outlives its process.

    torch's `DataLoader` accepts it as an `IterableDataset` if torch was imported before it was made.

    Args:
        streams: Data sets to mix; replaces `remote`, `local` and `split`.
        remote: URI or path of the data set's folder. A path is read in place unless `local` is another
            folder.
        local: Cache folder, which the processes of a machine may share. Without `remote`, the data set
            itself; compressed shards are then decompressed into it.
        split: Subfolder of both; or a split by the names of Parquet files, as in `data/train-00000.parquet`;
            or one of a data set on a hub, as its README or the names of its files tell it.
        config: Name of the configuration of a data set on a hub (`hf://datasets/owner/name`); by default its
            only or default one.
        format: `mds` for a folder with an `index.json`, or `parquet` for a folder of Parquet files, whose row
            groups are read as shards. By default an `index.json` decides, and without one Parquet files.
        columns: Names of the columns to read from Parquet files; others are not fetched.
        encodings: Encodings of columns of Parquet files, such as `{"image": "jpeg"}`, instead of the usual
            ones.
        filters: The rows of Parquet files to read: conditions that all hold, such as `[("lang", "==", "en"),
            ("length", "<", 512)]`, or a list of such lists, one of which holds. Folders such as `lang=de`
            that cannot have such rows are not opened.
        schema: Policy for Parquet files whose columns differ. `equal`, the default, refuses them. `union`: a
            column that a file lacks is null there. `permissive`: as `union`, and integers of several types
            are `int64`, floats `float64`.
        epoch_size: Number of samples in an epoch, such as 100000 or `100k` (powers of 1,000). By default each
            sample once, or as the streams' weights determine.
        weights: Weights of the streams that change during the run: pairs of the first sample, counted over
            all ranks and epochs, and the weights by `Stream.name`, such as `[(0, {"web": 0.7, "code": 0.3}),
            ("12.8M", {"web": 0.5, "code": 0.5})]`. `"50000ba"` counts batches. Each stream is read whole
            before any of it comes again.
        batch_size: Number of samples in a batch on each rank. Give this or `global_batch_size`.
        global_batch_size: Number of samples in a batch over all ranks; it need not be divisible by them.
        batching_method: Policy for mixing streams. `random`: the streams are shuffled together. `stratified`:
            all batches have the same number of samples of each stream, by largest remainder; the epoch ends
            with the first stream that ends. `per_stream`: each batch has samples of one stream only.
        sampling_method: Policy for an epoch that uses part of a stream: `balanced` samples again in
            each epoch if `shuffle` is set, `fixed` always takes the same samples.
        sampling_granularity: Number of samples drawn from one shard at a time. More means fewer shards to
            fetch.
        shuffle: Permute the shards, and the samples within blocks, in each epoch. False is storage order.
        shuffle_seed: Seed of permutations and sampling, from 0 to below 2^64.
        shuffle_block_size: Number of samples in a shuffle block; 262,144 by default.
        num_canonical_nodes: Number of lanes that each batch is drawn from; it divides the global batch
            size. A machine reads only the shards of its own lanes if the number of machines divides it. By
            default gcd(global batch size, 64), and 1 (storage order) without shuffling.
        tail: Policy for the last batch of an epoch: keep it `short`, `drop` it, or `pad` it with the epoch's
            first samples.
        order: `native`, or `mosaic` or a `MosaicOrder`, which gives the samples, batches and states of
            mosaicml-streaming, so that its runs can be resumed, and its defaults for `shuffle_block_size` and
            `num_canonical_nodes`. It depends on the number of nodes (`LOCAL_WORLD_SIZE`), and planning takes
            time and memory proportional to the number of samples.
        validate_hash: Name of the digest to check; by default the fastest one in the index. Shards are
            checked after download, and when a process first opens a cached one.
        keep_zip: Keep downloaded compressed shards beside the raw ones.
        keep_shards: Keep downloaded shards in the cache folder. If not, shards are in memory while batches
            need them, and nothing but the index is written to the disk: for a single pass, or a disk that is
            slower than the network. Each epoch and each process then downloads its shards itself.
        cache_limit: Maximum size of the cache folders together, such as `100gb` (powers of 1,024); the same
            for all processes of a machine. The least recently used shard is evicted first, never one in
            use. A shard that does not fit is held in memory while batches need it. Data without a remote is
            never removed.
        rank: Data-parallel rank; by default that in torch's process group, else of the environment (`RANK`,
            or what `srun` or `mpirun` sets), divided by `replication`.
        world_size: Number of data-parallel ranks; by default likewise (`WORLD_SIZE`).
        replication: Number of consecutive processes that read the same samples. Hocket's trainer sets it by
            `follow_ranks` if neither it nor `rank` is given.
        allow_unsafe_types: Accept `pkl` columns, which run code from the data when they are decoded.
        on_bad_sample: Policy for a sample that cannot be decoded although its shard is intact: `raise`, or
            `replace` it with the next good sample of its stream in storage order, which is the same on any
            number of ranks. With `replace`, images are decoded while reading and not on first access.
        download_timeout: Seconds for all attempts of one request together, plus one second per MiB.
        download_retry: Number of times a shard is fetched before wrong bytes raise an error.
        prefetch_bytes: Maximum size of shards fetched ahead of their first use, such as `256mb`.
        prefetch_batches: Maximum number of finished batches in the queue.
        prefetch_next_epoch: Fetch the first shards of the next epoch during the last batches of this one,
            within `prefetch_bytes`. Has no effect with `order="mosaic"`, or if shards do not fit in the
            cache.
        fetch_threads: Number of shards fetched concurrently.
        algorithms: `shuffle_algo` and `partition_algo`, as in `MosaicOrder`; one of them implies
            `order="mosaic"`.

    Raises:
        ConfigError: An argument is not valid, or there are more ranks than samples.
        IndexNotFoundError: There is no index.
        IndexCorruptError: The index is not valid.
        StoreError: The object store failed.

    Example:
        >>> dataset = StreamingDataset(remote="s3://bucket/train", batch_size=32, shuffle=True)
        >>> for batch in dataset.batches():
        ...     batch["tokens"]  # (32, 1024) uint16
    """

    yields_samples: ClassVar[bool] = True
    """Whether iteration yields samples, so that a trainer needs a loader of it."""
    _limits_index: ClassVar[bool] = True
    """Whether the index files count under `cache_limit`, too."""

    _plan: SampleOrder | None = None
    _global_batch_size: int | None = None
    _is_batch_of_rank = False
    """Whether the batch size was given for each rank, and not for all of them."""
    _is_tail_reported = False

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        config: str | None = None,
        format: str | None = None,  # noqa: A002 - the usual name
        columns: Sequence[str] | None = None,
        encodings: Mapping[str, str] | None = None,
        filters: Filters | None = None,
        schema: str | None = None,
        epoch_size: int | str | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        weights: Weights | None = None,
        batching_method: str = "random",
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        shuffle: bool = False,
        shuffle_seed: int = SHUFFLE_SEED,
        shuffle_block_size: int | None = None,
        num_canonical_nodes: int | None = None,
        tail: str = "short",
        order: str | MosaicOrder | None = None,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        keep_shards: bool = True,
        cache_limit: int | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        replication: int | None = None,
        allow_unsafe_types: bool = False,
        on_bad_sample: str = "raise",
        download_timeout: float = DOWNLOAD_TIMEOUT_S,
        download_retry: int = DOWNLOAD_RETRY,
        prefetch_bytes: int | str = PREFETCH_BYTES,
        prefetch_batches: int = PREFETCH_BATCHES,
        prefetch_next_epoch: bool = True,
        fetch_threads: int = FETCH_THREADS,
        **algorithms: str | None,
    ) -> None:
        refuse_foreign(type(self).__name__, algorithms)
        self._options = OrderOptions(
            mosaic=choose_order(order, algorithms),
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            num_canonical_nodes=num_canonical_nodes,
            tail=tail,
            batching_method=batching_method,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            epoch_size=epoch_size,
            weights=weights,
        )
        self.data_parallel = resolve_data_parallel(rank, world_size, replication=replication)
        """This process's data-parallel (rank, number of ranks)."""
        self._follows_ranks = rank is None and replication is None
        self._num_nodes = resolve_num_nodes(
            self.data_parallel[1], is_given=rank is not None, replication=replication
        )
        fetching = SourceSettings(
            validate_hash=validate_hash,
            keep_zip=keep_zip,
            keep_shards=keep_shards,
            download_timeout=download_timeout,
            download_retry=download_retry,
        )
        reading = ReadSettings(
            prefetch_bytes=prefetch_bytes,
            prefetch_batches=prefetch_batches,
            prefetch_next_epoch=prefetch_next_epoch,
            fetch_threads=fetch_threads,
            cache_limit=cache_limit,
            limits_index=self._limits_index,
            allow_unsafe_types=allow_unsafe_types,
            on_bad_sample=on_bad_sample,
        )
        self._streams = choose_streams(
            streams,
            remote,
            local,
            split,
            config=config,
            format=format,
            columns=columns,
            encodings=encodings,
            filters=filters,
            schema=schema,
        )
        size, has_size = None, batch_size is not None or global_batch_size is not None
        if has_size and weights is not None:
            ranks = self.data_parallel[1]
            size = resolve_global_batch_size(batch_size, global_batch_size, num_ranks=ranks)
        self._open(fetching, reading, size)
        # A subclass may put a refusal of the size off, so it comes from `set_batch_size` alone.
        if has_size:
            self.set_batch_size(batch_size, global_batch_size=global_batch_size)

    def _open(self, fetching: SourceSettings, reading: ReadSettings, size: int | None) -> None:
        self.cursor = Cursor()
        """The current position. `batches`, `__iter__` and the loader move it."""
        self._reader = DatasetReader(
            resolve_sources(self._streams, fetching),
            reading,
            weigh=lambda sizes: self._options.counts(self._streams, sizes, global_batch_size=size),
        )
        check_epoch_size(self.epoch_size, num_ranks=self.data_parallel[1], origin=self._reader.origin)
        self._is_known_to_torch = register_with_torch(type(self))

    def set_batch_size(self, batch_size: int | None = None, *, global_batch_size: int | None = None) -> None:
        """Set the batch size, once. The loader calls this with its own `batch_size`.

        Args:
            batch_size: Number of samples on each rank.
            global_batch_size: Number of samples over all ranks.

        Raises:
            ConfigError: Both or neither are given, the batch is smaller than the number of ranks, the lanes
                do not divide it, it is too small for a stream, `tail="drop"` leaves no batch, or another size
                was set before.
        """
        size = resolve_global_batch_size(batch_size, global_batch_size, num_ranks=self.data_parallel[1])
        check_one_size(size, before=self._global_batch_size)
        if self._plan is None:
            self._plan = self._options.plan(
                self._reader,
                self._streams,
                self.data_parallel,
                global_batch_size=size,
                num_nodes=self._num_nodes,
            )
        self._global_batch_size = size
        self._is_batch_of_rank = batch_size is not None

    def follow_ranks(self, rank: int, num_ranks: int) -> None:
        """Serve these data-parallel ranks, as a trainer knows them whose ranks share samples.

        Does nothing if the data set was given `rank` or `replication`. A batch size that was given for each
        rank stays as it is, and the global batch follows. Call it before workers are started.

        Args:
            rank: Data-parallel rank of this process.
            num_ranks: Number of data-parallel ranks.

        Raises:
            ConfigError: The data or the batch do not fit the ranks, or the data set has been read already.
        """
        if not self._follows_ranks or (rank, num_ranks) == self.data_parallel:
            return
        data_parallel = resolve_data_parallel(rank, num_ranks)
        check_epoch_size(self.epoch_size, num_ranks=num_ranks, origin=self._reader.origin)
        size, before = self._global_batch_size, self.data_parallel
        is_changed = size is not None and self._is_batch_of_rank
        if is_changed and self.cursor.batch:
            raise ConfigError(
                f"the data set is at batch {self.cursor.batch} of its epoch as rank {before[0]} of "
                f"{before[1]}, and is to serve rank {rank} of {num_ranks}, whose global batches have another "
                "size: give it `replication` or `global_batch_size`"
            )
        schedule = self.weights
        self.data_parallel, self._plan, self._global_batch_size = data_parallel, None, None
        self._num_nodes = 1  # as for ranks that `replication` divides
        if size is not None and is_changed:
            self.set_batch_size(size // before[1])
        elif size is not None:
            self.set_batch_size(global_batch_size=size)
        if schedule is not None and isinstance(plan := self.plan, MixedSampleOrder):
            plan.follow(schedule, is_resized=is_changed)

    @property
    def plan(self) -> SampleOrder:
        """The order of samples.

        Raises:
            ConfigError: No batch size has been set.
        """
        if self._plan is None:
            raise ConfigError("no batch size is set: give `batch_size` or `global_batch_size`")
        return self._plan

    @property
    def epoch_size(self) -> int:
        """Number of samples in an epoch."""
        return sum(self._reader.counts)

    @property
    def stream_counts(self) -> list[int]:
        """Number of samples of each stream in an epoch; with `weights`, in the first one."""
        if isinstance(self._plan, MixedSampleOrder):
            return list(self._plan.counts(self.epoch_size).values())
        return list(self._reader.counts)

    @property
    def num_batches(self) -> int:
        """Number of batches in the current epoch, which is the same on every rank."""
        return self.plan.num_batches(self.cursor.epoch)

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in an epoch."""
        return self.plan.num_local_samples(self.cursor.epoch)

    def __repr__(self) -> str:
        rank, world_size = self.data_parallel
        size = self._global_batch_size
        batches = "no batch size yet" if size is None else f"{size} a global batch"
        return (
            f"<{type(self).__name__} {self._reader.origin!r}: {self.epoch_size} samples an epoch, {batches}, "
            f"at batch {self.cursor.batch} of epoch {self.cursor.epoch}, rank {rank} of {world_size}>"
        )

    def sample_ids(self, batch: int, *, epoch: int | None = None) -> list[int]:
        """Return the samples of a global batch, in order, as numbers in storage order. Reads no data.

        The samples of the first stream are numbered first, then those of the second, and so on.

        Args:
            batch: Number of the batch in its epoch.
            epoch: The epoch; the current one by default.

        Raises:
            IndexError: The epoch does not have this batch.
        """
        return self.plan.batch_ids(self.cursor.epoch if epoch is None else epoch, batch)

    def read_batches(
        self, *, epoch: int, first: int = 0, stride: int = 1, start: int | None = None
    ) -> Iterator[RankBatch]:
        """Yield this rank's part of batches `first`, `first + stride`, … of an epoch.

        Does not move the cursor.

        Args:
            epoch: The epoch.
            first: Number of the first batch to read.
            stride: Distance between two batches, such as the number of workers that share an iteration.
            start: Number of the first batch of the iteration, if several readers share it.

        Raises:
            ShardNotFoundError: A shard is neither in the cache nor in the remote.
            ShardCorruptError: A shard has wrong bytes after all fetches.
            SampleCorruptError: A sample cannot be decoded, and `on_bad_sample` is `raise`.
            StreamIOError: The cache folder cannot be read or written.
            StoreChangedError: The data set was written again during the run.
            StoreError: The object store failed.
        """
        epoch_pass = self.plan.passes(epoch, first if start is None else start)
        yield from epoch_pass.read(self._reader, first=first, stride=stride, with_ids=self.makes_samples)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's batches of an epoch, each a mapping from columns to values.

        The values of a column are one writable array, or a list if they differ in size.

        The first iteration is of epoch 0. Each further one starts the following epoch from its beginning,
        whether or not the one before was read to its end. After `load_state_dict` it continues from the
        loaded position, after `set_epoch` it starts that epoch; an iteration that yielded nothing does not
        count. A rank without a share of a short last batch gets one sample, with a share of 0.

        Raises:
            ConfigError: Another iteration was started, or a state loaded, while this one is in use; or a
                subclass has its own `__getitem__`, which makes samples and not columns.
            ShardNotFoundError: As `read_batches`, with its other errors.
        """
        self._check_columns_are_wanted()
        is_whole = False
        while not is_whole:
            token, weights = self.begin_pass(), self.weights
            for batch in self.read_batches(epoch=self.cursor.epoch, first=self.cursor.batch):
                self.cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
                yield batch.columns
                if self.weights is not weights:
                    break  # what was read ahead has the weights from before
            else:
                is_whole = True
        self.cursor.end_epoch(token)

    def __iter__(self) -> SampleIterator:
        """Return an iterator over this rank's samples, each a mapping from columns to values.

        Samples that do not count are left out. Epochs follow as in `batches`, also in the worker processes of
        a torch DataLoader: all workers of one iteration read the same epoch. The state advances by whole
        batches, when the last sample of a batch was yielded. It does not advance while workers iterate,
        because this object does not know which samples they have yielded.

        Raises:
            ConfigError: Accelerate or Hugging Face's Trainer reads it and would divide it over ranks again.
        """
        check_divided_once(self.data_parallel[1])
        worker = resolve_worker()
        return SampleIterator(
            self.read_batches, self.samples, self.cursor, worker, token=self.begin_pass(worker)
        )

    @property
    def weights(self) -> MixSchedule | None:
        """The weights of the streams by sample of the run; None if they do not change."""
        return self._plan.schedule if isinstance(self._plan, MixedSampleOrder) else None

    def set_weights(self, weights: Mapping[str, float], *, at: int | str | None = None) -> None:
        """Change the weights of the streams from a sample of the run on, in place of later phases.

        Running iterations of `batches` and of `StreamingDataLoader` go on with the new weights; others end.
        Call it on all ranks: if torch's process group exists, it is a collective that compares what they
        pass. States have the new weights, and a run that is resumed from one keeps them.

        Args:
            weights: Weight by stream name.
            at: Number of the first sample, over all ranks and epochs, or batch, such as `50000ba`; by default
                the next sample after the last yielded batch. With a loop that fetches batches ahead, such as
                that of a trainer, give it.

        Raises:
            ConfigError: The data set was made without `weights`, they are not valid, `at` has been passed, or
                ranks pass different values.
        """
        plan = self._plan
        if not isinstance(plan, MixedSampleOrder):
            raise ConfigError("`set_weights` needs a data set with `weights` and a batch size: give both")
        if not isinstance(weights, Mapping):
            raise ConfigError(f"`weights` is {weights!r:.100}: expected weights by stream name")
        position = plan.position(self.cursor.epoch, self.cursor.batch)
        if isinstance(at, str):
            at = parse_start("at", at, plan.batch_starts)
        start = position if at is None else whole("at", at, least=position)
        agree_over_ranks("set_weights", (start, sorted(weights.items())))
        plan.set_weights(start, weights)
        self.cursor.go(self.cursor.epoch, self.cursor.batch)

    def order_digest(self) -> int:
        """Return a digest of the data, the order and its weights; 0 if the order depends on ranks.

        It is the same on all ranks of a run, which a trainer checks, and below 2^52.
        """
        if not isinstance(self._plan, NativeSampleOrder):
            return 0
        phases = [] if self.weights is None else self.weights.native()  # without the names of streams
        return int(digest([self._plan.settings.used(), phases])[:13], 16) or 1

    def batch_share(self) -> tuple[int, int]:
        """Return how many samples of the last yielded batch count on this rank, and over all ranks."""
        return self.cursor.share

    def metrics(self) -> dict[str, float]:
        """Return counters of this process since the data set was made, by names for loggers.

        `stream/batches`: batches taken. `stream/wait_s`: seconds spent waiting for them.
        `stream/queue_depth`: batches that were ready at the last request. `stream/cache_hits`: shard files
        found in the cache. `stream/fetches`, `stream/fetched_bytes`: shard files fetched from the remote,
        and their size. `stream/requests`, `stream/retries`: requests to the store, and those repeated after
        a failure. `stream/passed`: shards held in memory because the cache was full. `stream/evicted`:
        shards evicted. `stream/replaced`: samples replaced because they could not be decoded. Worker
        processes count separately.
        """
        return self._reader.metrics()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at its beginning.

        Not needed otherwise: iterations count epochs by themselves.

        Raises:
            ConfigError: `epoch` is not an integer from 0, or Accelerate calls this for a loader that would
                divide the data set over ranks again.
        """
        check_divided_once(self.data_parallel[1])
        self.cursor.go(whole("epoch", epoch), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, for any number of ranks: JSON values, below 1 KB.

        With `order="mosaic"` it has the format of mosaicml-streaming.
        """
        return self.plan.state(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state; the next iteration continues from it.

        Raises:
            StateMismatchError: It was saved with other data or another order; the message names the field.
            ConfigError: It is not a state of a streaming data set.
        """
        self.plan.load(state, self.cursor)

    def begin_pass(self, worker: LoaderWorker | None = None) -> int:
        """Move the cursor to the start of a new iteration and return the iteration's token.

        Called by `batches`, `__iter__` and the loader. Logs once, on rank 0, how the last batch is handled.

        Args:
            worker: The DataLoader worker that this process is; None outside of one.
        """
        token = self.cursor.begin(None if worker is None else (worker.number, worker.base_seed))
        if not self._is_tail_reported and self.data_parallel[0] == 0:
            self._is_tail_reported = True
            log_notices(self.plan, self._reader.notices)
        return token
