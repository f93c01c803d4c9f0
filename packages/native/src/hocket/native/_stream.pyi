"""The part of `_native.pyi` about data sets: shards, their order, the cache, and reading and writing."""

from builtins import list as _list
from os import PathLike
from typing import TypeAlias, TypedDict, final, type_check_only

from typing_extensions import Buffer

from hocket.native._store import Store

_File: TypeAlias = tuple[str, int, dict[str, str]]

@final
class ShardIndex:
    """A checked `index.json`. Immutable and without locks, so safe in threads and forked children."""

    @staticmethod
    def parse(data: bytes, origin: str) -> ShardIndex:
        """Read an index; `origin` is its path or URI, for messages.

        Raises:
            IndexCorruptError: No valid index, or one with base names that leave the data set's folder.
            ConfigError: A valid one that uses what is not supported.
        """

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""

    @property
    def num_shards(self) -> int:
        """Shards, empty ones included."""

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over columns and shards; the same wherever the data set lies."""

    @property
    def columns(self) -> _list[tuple[str, str, int | None]]:
        """Name, encoding and bytes a value (or `None`) of each column that any shard has.

        A name comes more than once where shards differ in its encoding.
        """

    @property
    def mixed_columns(self) -> _list[str]:
        """Names of the columns that some shard lacks, or has in another encoding."""

@final
class StreamMix:
    """Streams, and the samples an epoch takes of each. Immutable, without locks, safe in forked children.

    Args:
        indexes: The streams.
        counts: Samples of an epoch by stream, more or fewer than it has.

    Raises:
        ConfigError: Samples of a stream that has none, or numbers that leave their types.
    """

    def __new__(cls, indexes: _list[ShardIndex], counts: _list[int]) -> StreamMix: ...
    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def order(
        self,
        *,
        epoch: int,
        global_batch_size: int,
        num_canonical_nodes: int,
        shuffle: bool,
        shuffle_seed: int,
        shuffle_block_size: int,
        tail: str,
        batching_method: str,
        sampling_method: str,
        sampling_granularity: int,
    ) -> EpochOrder:
        """Plan an epoch in the native order: one pass over the shards, none over the samples.

        Raises:
            ConfigError: A size of 0, lanes that do not divide the batch, an unknown name, a stream without a
                sample in a stratified batch, or one that repeats without measure.
        """

    def listed_order(self, ids: Buffer, edges: Buffer) -> EpochOrder:
        """Take an order planned elsewhere: batch `k` is `ids[edges[k]:edges[k + 1]]`, both contiguous uint64.

        Raises:
            ConfigError: A sample that the streams do not have, or edges that do not ascend to the number of
                ids.
            BufferError: Other than contiguous uint64.
        """

@final
class EpochOrder:
    """The order of one epoch: which samples each batch holds, in which order."""

    @property
    def num_batches(self) -> int:
        """Batches of the epoch, on every rank."""

    @property
    def num_dropped(self) -> int:
        """Samples that the epoch leaves out."""

    @property
    def num_repeated(self) -> int:
        """Samples that `tail="pad"` repeats."""

    def share(self, batch: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return how many samples of a batch count on a rank, and over all ranks."""

    def num_local_samples(self, rank: int, world_size: int) -> int:
        """Return how many samples of all batches count on a rank."""

    def sample_ids(self, batch: int) -> _list[int]:
        """Return a batch's samples over all ranks, by their numbers in storage order."""

    def rank_ids(self, batch: int, rank: int, world_size: int) -> _list[int]:
        """Return the samples that a rank reads of a batch; one that does not count where it has no share."""

@final
class ShardCache:
    """A data set's shards on this machine: fetched whole, checked, by one process of the machine for all.

    Its locks are the kernel's and go with their process. Of this process: a forked child makes its own.

    Args:
        index: What there is.
        local: The folder; without a remote, the data set itself.
        remote: URI of the data set, if it is elsewhere.
        written_ms: When the index was last written, as `load_shard_index` says.
        deadline_s: Seconds that all tries of one request may take together.
        keep_zip: Keep a downloaded compressed file beside the raw one.
        keep_shards: Keep fetched shards in the folder; if not, they are in memory while they are open.
        attempts: Fetches of a shard before wrong bytes are final.
        validate_hash: The digest to check; by default the quickest one that the index carries.
        limit: Of the folder's bytes; without a remote of no account.
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
        attempts: int,
        validate_hash: str | None,
        limit: CacheLimit | None,
    ) -> ShardCache: ...
    def take_notices(self) -> _list[str]:
        """Return, once, what happened that a person may want to know."""

    def counters(self) -> _CacheCounts:
        """Return what it did since it was made.

        `cache_hits` counts files of shards that were there when they were opened; `fetches` those that came
        from the remote, tries included, and `fetched_bytes` their bytes; `passed` those that the limit left
        no room for, and that were held in memory. `requests` for shards were made of the remote, if that is
        no folder, `retries` of failed ones among them.
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
    """So many bytes for cache folders together, kept by all processes of a machine that have the same limit.

    The file used longest ago goes first, and none that a reader of such a process holds open. What has no
    remote must not be put under a limit.

    Args:
        num_bytes: For shards, parts of them, and the indexes.
        folders: Each cache folder and the index that is in it.

    Raises:
        ConfigError: The indexes alone take as much.
    """

    def __new__(
        cls, num_bytes: int, folders: _list[tuple[str | PathLike[str], ShardIndex]]
    ) -> CacheLimit: ...
    @property
    def num_bytes(self) -> int:
        """The limit."""

    @property
    def num_evicted(self) -> int:
        """Files that this process removed."""

@final
class BatchReader:
    """A rank's part of batches `first`, `first + stride`, …, read ahead by threads named `hocket-*`.

    Args:
        caches: The streams' shards, in the order in which `order` numbers them.
        order: Of the epoch.
        following: Of the next one, whose first shards are fetched when this one's are, within the same bytes.
        rank: This rank.
        world_size: How many ranks divide each batch.
        first: The first batch.
        stride: The distance to the next one.
        prefetch_bytes: Bytes of shards that may be fetched ahead of their first use.
        prefetch_batches: Finished batches that may wait.
        fetch_threads: Shards fetched at once.

    Raises:
        ConfigError: The streams differ in columns, the rank is outside its world, or the stride is 0.
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
        """Return the next batch, or `None` after the last. Blocks; Ctrl-C ends the wait within 100 ms.

        The batch: its number, its samples that count on this rank and over all ranks, and for each column
        the bytes of all values (writable, the caller's own); where they differ in size, their offsets
        (uint64, one more than values); and where not every sample has one, which do (uint64).

        Raises:
            ShardNotFoundError: A shard of the index is nowhere.
            ShardCorruptError: Its bytes are not what the index says, however often fetched.
            SampleCorruptError: A sample's sizes do not add up, or its text is not of its columns' types.
            StreamIOError: The cache folder refuses.
            StoreError: The store's own errors, as they come.
        """

    def queued(self) -> int:
        """Return how many finished batches wait."""

    def close(self) -> None:
        """End the threads. The next `next` says `None`."""

def look_up(
    caches: _list[ShardCache], order: EpochOrder
) -> _list[tuple[memoryview, memoryview | None, memoryview | None]] | None:
    """Return the columns of an order's first batch, without threads, or `None` where that needs a reader.

    Shards that are here are opened; of others, if raw and large, the samples' ranges are read, near ones
    together, and not kept. `None`: a shard should be fetched whole, because it is compressed or small, or
    because much of it is asked for, or often. Columns are as `BatchReader.next` has them. Blocks; Ctrl-C
    ends the wait.

    Raises:
        ShardNotFoundError: And the others of `BatchReader.next`.
    """

@final
class SampleBuffer:
    """The samples of a shard in the making, in memory that earlier shards left. Not for several threads.

    Args:
        columns: Name, encoding, and bytes of every value or None where they differ; in the sample's order.
        capacity_bytes: Room to begin with; it grows as needed.
    """

    def __new__(
        cls, columns: _list[tuple[str, str, int | None]], *, capacity_bytes: int = 0
    ) -> SampleBuffer: ...
    def push(self, sample: object) -> int | None:
        """Add a sample of the columns, if its values only need to be copied.

        That is so of a dict whose values are bytes, or of columns `str`, numbers and arrays: texts, Python's
        own numbers that the type holds, and C-contiguous NumPy arrays of the very type and shape.

        Returns:
            The bytes it has, or None: nothing was added, and what is to be done is to encode it otherwise, or
            to say what is wrong with it.
        """

    def push_bytes(self, encoded: bytes) -> int:
        """Add a sample that is encoded already, and return how many bytes it has."""

    def __len__(self) -> int:
        """Return how many samples there are."""

@final
class ShardWriter:
    """Puts shards in place side by side, in threads named `hocket-seal-*`; the index is the caller's.

    It has as many shards in hand as threads, and one more in `submit`. Nothing appears under a final name
    before it is whole. Of the process that made it.

    Args:
        local: A folder to write into, made as needed.
        remote: A store to write into.
        compression: Such as `zstd:7`; a compressed file's name ends with the codec's.
        hashes: Digests to describe files with, by name.
        only_new: Refuse to replace a file.
        threads: Shards worked on at once.

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
        """Hand over one shard, as soon as a thread is free for it.

        Args:
            basename: The raw file's name.
            config: JSON that goes behind the offsets.
            samples: They are taken out of it.
            keep: So many of the last stay there, as the first of the next shard.
            header: Makes it a text shard: what stands before its samples. Offsets go to `<basename>.meta`.

        Raises:
            ConfigError: A shard of 4 GiB or more.
            StreamIOError: The folder refused this shard or an earlier one.
            DatasetExistsError: `only_new`, and a file is there.
            StoreError: The store's own errors, as they come.
        """

    def finish(self) -> _list[_list[tuple[_File, _File | None]]]:
        """Wait until all shards are in place, and end the threads.

        Returns:
            For each shard, in order, what the index is to say of its file, or of its data and meta file: base
            name, size and digests of the raw form, and of the compressed one if there is one.

        Raises:
            As `submit`.
        """

    @property
    def num_written(self) -> int:
        """Shards that are in place, as far as was heard at the last `submit`."""

    def close(self) -> None:
        """End the threads; shards on their way are given up. It waits for files that are being written."""

def load_shard_index(
    local: str | PathLike[str], remote: str | None, *, deadline_s: float
) -> tuple[bytes, int]:
    """Return a data set's `index.json`; with a remote from there, leaving a copy in `local`.

    And when it was last written, in milliseconds since 1970 as the store says; 0 where that is not known.

    Raises:
        IndexNotFoundError: There is none.
    """

def load_kept_shard_index(
    local: str | PathLike[str], remote: str, *, deadline_s: float
) -> tuple[bytes, int] | None:
    """Return what `load_shard_index` left in `local`; None where that is nothing, or of another data set."""

def hash_names() -> _list[str]:
    """Return the digests that shards may carry, the quickest to compute first."""
