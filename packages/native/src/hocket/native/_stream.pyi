"""The part of `_native.pyi` about data sets: shards, their order, the cache, readers and writers."""

from builtins import list as _list
from os import PathLike
from typing import Protocol, TypeAlias, TypedDict, final, type_check_only

from typing_extensions import Buffer

from hocket.native._store import Store

_File: TypeAlias = tuple[str, int, dict[str, str]]

@final
class ShardIndex:
    """A validated `index.json`. Immutable and without locks, so safe in threads and forked children."""

    @staticmethod
    def parse(data: bytes, origin: str) -> ShardIndex:
        """Parse an index; `origin` is its path or URI, for messages.

        Raises:
            IndexCorruptError: The index is not valid, or a base name points outside the data set's folder.
            ConfigError: The index is valid but uses an unsupported feature.
        """

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""

    @property
    def num_shards(self) -> int:
        """Number of shards, including empty ones."""

    @property
    def fingerprint(self) -> str:
        """A hash of the columns and shards, 32 hexadecimal digits; independent of the data set's location."""

    @property
    def columns(self) -> _list[tuple[str, str, int | None]]:
        """Name, encoding and bytes per value (None if they differ) of each column that any shard has.

        A name is listed more than once if shards differ in its encoding.
        """

    @property
    def mixed_columns(self) -> _list[str]:
        """Names of the columns that some shard lacks or has in another encoding.

        `int` and `int64` count as one encoding.
        """

@final
class StreamMix:
    """A mix of streams, with the number of samples that an epoch takes from each.

    Immutable and without locks, so safe in forked children.

    Args:
        indexes: The streams.
        counts: Number of samples per epoch for each stream; may differ from the number that the stream has.

    Raises:
        ConfigError: Samples are requested from an empty stream, or the numbers overflow their types.
    """

    def __new__(cls, indexes: _list[ShardIndex], counts: _list[int]) -> StreamMix: ...
    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""

    def order(self, settings: _OrderSettings, *, epoch: int) -> EpochOrder:
        """Plan an epoch in the native order, in time proportional to the number of shards, not of samples.

        Raises:
            ConfigError: A size is 0, the lanes do not divide the batch, a name is unknown, a stream has no
                sample in a stratified batch, or a stream has too many repeats.
        """

    def scheduled_order(
        self,
        settings: _OrderSettings,
        phases: _list[tuple[int, _list[int]]],
        *,
        epoch_size: int,
        epoch: int,
    ) -> EpochOrder:
        """Plan an epoch of a mix whose weights change at samples of the run.

        Args:
            settings: As for `order`.
            phases: First sample of each phase, counted over all epochs, and whole weights of the streams.
            epoch_size: Number of samples in an epoch.
            epoch: The epoch.

        Raises:
            ConfigError: As `order`; or phases that do not follow each other, or settings that do not apply.
        """

    def listed_order(self, ids: Buffer, edges: Buffer) -> EpochOrder:
        """Return an order from an external plan: batch `k` is `ids[edges[k]:edges[k + 1]]`, both uint64.

        Raises:
            ConfigError: The streams do not have a sample, or the edges do not ascend from 0 to the number of
                ids.
            BufferError: A buffer is not contiguous uint64.
        """

@type_check_only
class _OrderSettings(Protocol):
    @property
    def global_batch_size(self) -> int: ...
    @property
    def num_canonical_nodes(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def shuffle_seed(self) -> int: ...
    @property
    def shuffle_block_size(self) -> int: ...
    @property
    def tail(self) -> str: ...
    @property
    def batching_method(self) -> str: ...
    @property
    def sampling_method(self) -> str: ...
    @property
    def sampling_granularity(self) -> int: ...

def mix_counts(phases: _list[tuple[int, _list[int]]], position: int) -> _list[int]:
    """Return how many of the first `position` samples of a run are of each stream; see `scheduled_order`.

    Raises:
        ConfigError: The phases do not follow each other.
    """

@final
class EpochOrder:
    """The order of one epoch: the samples of each batch, in sequence."""

    @property
    def num_batches(self) -> int:
        """Number of batches in the epoch, the same on every rank."""

    @property
    def num_dropped(self) -> int:
        """Number of samples that the epoch leaves out."""

    @property
    def num_repeated(self) -> int:
        """Number of samples that `tail="pad"` repeats."""

    def share(self, batch: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the number of samples of a batch that count on a rank, and over all ranks."""

    def num_local_samples(self, rank: int, world_size: int) -> int:
        """Return the number of samples of all batches that count on a rank."""

    def sample_ids(self, batch: int) -> _list[int]:
        """Return the samples of a batch over all ranks, by number in storage order."""

    def rank_ids(self, batch: int, rank: int, world_size: int) -> _list[int]:
        """Return the samples of a batch that a rank reads; without a share, one that does not count."""

@final
class ShardCache:
    """The cache of one data set's shards on this machine, shared by its processes.

    A shard is fetched whole and verified, once for all processes of the machine. The locks are kernel locks,
    which end with their process. Threads may share the object; a forked child must create its own.

    Args:
        index: The index of the data set.
        local: The cache folder; without a remote, the folder of the data set itself.
        remote: URI of the data set, or None if `local` is the data set.
        written_ms: Time of the index's last write, as returned by `load_shard_index`.
        deadline_s: Seconds for all attempts of one request together.
        keep_zip: Keep a downloaded compressed file beside the raw one.
        keep_shards: Keep fetched shards in the folder; if not, they are in memory while they are open.
        download_retry: Number of fetches of a shard before wrong bytes raise an error.
        validate_hash: The digest to check; by default the fastest one in the index.
        limit: The limit on the folder's bytes; without a remote it has no effect.
    """

    def __new__(
        cls,
        index: ShardIndex,
        local: str | PathLike[str],
        remote: str | None,
        *,
        written_ms: int,
        deadline_s: float,
        keep_zip: bool,
        keep_shards: bool,
        download_retry: int,
        validate_hash: str | None,
        limit: CacheLimit | None,
    ) -> ShardCache: ...
    def take_notices(self) -> _list[str]:
        """Remove and return the notices for the user, such as a shard that was fetched twice."""

    def counters(self) -> _CacheCounts:
        """Return the counts since the cache was created.

        `cache_hits`: shard files found locally when they were opened. `fetches`: files fetched from the
        remote, including repeated fetches; `fetched_bytes`: their bytes. `passed`: files held in memory
        because the limit left no room. `requests`: requests to the remote, including retries; 0 if the remote
        is a folder. `retries`: requests repeated after a failed attempt.
        """

@type_check_only
class _CacheCounts(TypedDict):
    cache_hits: int
    fetches: int
    fetched_bytes: int
    passed: int
    requests: int
    retries: int

@final
class CacheLimit:
    """A limit on the total bytes of cache folders, enforced jointly by the processes of a machine.

    It holds for all processes with the same limit together. The least recently used file is evicted first; a
    file that a reader of such a process holds open is never evicted. Only for data sets with a remote.

    Args:
        num_bytes: Limit in bytes for shards, partly fetched shards, and the indexes.
        folders: Each cache folder with its index.

    Raises:
        ConfigError: The indexes alone reach the limit.
    """

    def __new__(
        cls, num_bytes: int, folders: _list[tuple[str | PathLike[str], ShardIndex]]
    ) -> CacheLimit: ...
    @property
    def num_bytes(self) -> int:
        """The limit in bytes."""

    @property
    def num_evicted(self) -> int:
        """Number of files that this process evicted."""

@final
class BatchReader:
    """A reader of a rank's part of batches `first`, `first + stride`, …, prefetched by `hocket-*` threads.

    Args:
        caches: The streams' caches, in the order in which `order` numbers their shards.
        order: The order of the epoch.
        following: The order of the next epoch, or None. Its first shards are fetched after the last ones of
            this epoch, within the same `prefetch_bytes`.
        rank: This rank.
        world_size: Number of ranks that share each batch.
        first: The first batch.
        stride: The distance to the next batch.
        prefetch_bytes: Maximum bytes of shards fetched ahead of their first use.
        prefetch_batches: Maximum number of finished batches in the queue.
        fetch_threads: Number of shards fetched concurrently.

    Raises:
        ConfigError: The streams differ in columns, the rank is not below the world size, or the stride is 0.
    """

    def __new__(
        cls,
        caches: _list[ShardCache],
        order: EpochOrder,
        following: EpochOrder | None,
        *,
        rank: int,
        world_size: int,
        first: int,
        stride: int,
        prefetch_bytes: int,
        prefetch_batches: int,
        fetch_threads: int,
    ) -> BatchReader: ...
    def next(
        self,
    ) -> tuple[int, int, int, _list[tuple[memoryview, memoryview | None, memoryview | None]]] | None:
        """Return the next batch, or None after the last. Blocks; Ctrl-C ends the wait within 100 ms.

        The batch is a tuple of its number, the number of its samples that count on this rank, that number
        over all ranks, and for each column: the bytes of all values (writable, owned by the caller); if their
        sizes differ, the offsets (uint64, one more than values), else None; and if some samples lack the
        column, the positions of those that have it (uint64), else None.

        Raises:
            ShardNotFoundError: A shard of the index is neither in the cache nor in the remote.
            ShardCorruptError: A shard's bytes differ from the index after all fetches.
            SampleCorruptError: A sample's sizes do not add up, or its text does not match the column types.
            StreamIOError: The cache folder cannot be read or written.
            StoreError: An error of the object store, passed on unchanged.
        """

    def queued(self) -> int:
        """Return the number of finished batches in the queue."""

    def close(self) -> None:
        """End the threads; `next` then returns None."""

def look_up(
    caches: _list[ShardCache], order: EpochOrder
) -> _list[tuple[memoryview, memoryview | None, memoryview | None]] | None:
    """Return the columns of an order's first batch without threads, or None if a reader is needed for it.

    Local shards are opened. From remote shards that are raw and large, only the ranges of the samples are
    read, nearby ones in one request, and not kept. None means that a shard should be fetched whole, because
    it is compressed or small, or because many of its samples are requested or it was read often. The columns
    have the form of `BatchReader.next`. Blocks; Ctrl-C ends the wait.

    Raises:
        ShardNotFoundError: As `BatchReader.next`, with its other errors.
    """

@final
class SampleBuffer:
    """A buffer of encoded samples for the next shard, in memory of earlier shards. Not thread-safe.

    Args:
        columns: Name, encoding, and bytes per value (None if they differ), in the order of the sample.
        capacity_bytes: Initial capacity; it grows as needed.
    """

    def __new__(
        cls, columns: _list[tuple[str, str, int | None]], *, capacity_bytes: int = 0
    ) -> SampleBuffer: ...
    def push(self, sample: object) -> int | None:
        """Append a sample, if its values only need to be copied.

        This is so for a dict whose values, in columns of `str`, numbers and arrays, are str, Python numbers
        within the range of the type, and C-contiguous NumPy arrays of exactly the column's type and shape;
        and for bytes that are certainly encoded already: any in a column of `bytes`, numbers, or arrays of
        one type and shape, UTF-8 in `str`, and files of JPEG and PNG in `jpeg` and `png`.

        Returns:
            The size of the sample in bytes; or None if nothing was added, so that the caller must encode the
            sample itself or report what is wrong with it.
        """

    def push_bytes(self, encoded: bytes) -> int:
        """Append a sample that is encoded already, and return its size in bytes."""

    def __len__(self) -> int:
        """Return the number of samples in the buffer."""

@final
class ShardWriter:
    """A writer that stores shards concurrently in threads named `hocket-seal-*`; the caller writes the index.

    The writer holds at most as many shards as threads, and one more in `submit`. A file gets its final name
    only when it is complete. A forked child cannot use the writer.

    Args:
        local: A folder to write into, made as needed.
        remote: A store to write into.
        compression: Codec and level, such as `zstd:7`; a compressed file's name ends with that of the codec.
        hashes: Names of the digests to record for each file.
        only_new: Raise if a file exists, instead of replacing it.
        threads: Number of shards written concurrently.

    Raises:
        ConfigError: An unknown hash or compression.
    """

    def __new__(
        cls,
        *,
        local: str | PathLike[str] | None,
        remote: Store | None,
        compression: str | None,
        hashes: _list[str],
        only_new: bool,
        threads: int,
    ) -> ShardWriter: ...
    def submit(
        self,
        basename: str,
        config: bytes,
        samples: SampleBuffer,
        *,
        keep: int = 0,
        header: bytes | None = None,
    ) -> None:
        """Submit one shard; block until a thread is free for it.

        Args:
            basename: The raw file's name.
            config: JSON that is written after the offsets.
            samples: The samples, which are removed from the buffer.
            keep: Number of samples at the end that stay in the buffer, as the first of the next shard.
            header: For a text shard, the bytes before its samples; the offsets are then written to
                `<basename>.meta`.

        Raises:
            ConfigError: The shard has 4 GiB or more.
            StreamIOError: The folder could not be written, for this shard or an earlier one.
            DatasetExistsError: `only_new` is set and a file exists.
            StoreError: An error of the object store, passed on unchanged.
        """

    def finish(self) -> _list[_list[tuple[_File, _File | None]]]:
        """Wait until all shards are stored, and end the threads.

        Returns:
            For each shard, in order, the index records of its file, or of its data and meta file: base name,
            size and digests of the raw form, and of the compressed one if there is one.

        Raises:
            As `submit`.
        """

    @property
    def num_written(self) -> int:
        """Number of stored shards, as of the last `submit`."""

    def close(self) -> None:
        """End the threads after the files that they are writing now; discard all other unfinished shards."""

def parquet_footers(uri: str, files: _list[tuple[str, int]], *, deadline_s: float) -> _list[str]:
    """Read the footers of Parquet files in parallel and return a summary of each, as JSON, in order.

    Args:
        uri: Path or URI of the folder.
        files: Name of each file in the folder, and its size.
        deadline_s: Seconds for all attempts of one request together.

    Raises:
        ShardCorruptError: A file is not Parquet, or its footer cannot be read.
        ShardNotFoundError: A file does not exist.
        StoreError: The object store failed.
    """

def load_shard_index(
    local: str | PathLike[str], remote: str | None, *, deadline_s: float
) -> tuple[bytes, int]:
    """Return a data set's `index.json` and the time of its last write, in milliseconds since 1970.

    With a remote, the index is read from there and a copy is stored in `local`. The time is that of the
    store's clock, and 0 if it is not known.

    Raises:
        IndexNotFoundError: There is no index.
    """

def load_kept_shard_index(
    local: str | PathLike[str], remote: str, *, deadline_s: float
) -> tuple[bytes, int] | None:
    """Return the copy that `load_shard_index` stored in `local`; None if there is none of this data set."""

def hash_names() -> _list[str]:
    """Return the names of the digests that shards may have, the fastest to compute first."""
