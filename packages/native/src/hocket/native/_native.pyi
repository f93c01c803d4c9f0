"""The Rust extension: one function per verb, none of which holds the interpreter lock while bytes move."""

from builtins import list as _list
from os import PathLike
from typing import Any, TypeAlias, final

from typing_extensions import Buffer

__version__: str

# --- store ------------------------------------------------------------------------------------

@final
class ObjectMeta:
    """One object of a store."""

    def __new__(cls, key: str, size: int, etag: str | None, modified_ms: int) -> ObjectMeta: ...
    @property
    def key(self) -> str:
        """The key, below the store's own prefix."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def etag(self) -> str | None:
        """The entity tag as the store writes it (S3: with its quotes); another object has another one."""

    @property
    def modified_ms(self) -> int:
        """Last change, in milliseconds since 1970 (UTC)."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[ObjectMeta], tuple[str, int, str | None, int]]: ...

@final
class Store:
    """Objects by key: `s3://bucket/prefix`, a local directory (path or `file:///dir`), or `memory://name`.

    A handle: URI and options, no client and no socket. It pickles, goes to threads, and stays good in a
    forked child; `memory://` stores are each process's own. Opening does no I/O. Every verb blocks without
    the interpreter lock, and Ctrl-C ends its wait within 100 ms.

    S3 reads `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
    `AWS_ENDPOINT_URL` (and `AWS_ENDPOINT_URL_S3`), `AWS_SKIP_SIGNATURE` and their like from the environment
    when it is opened or unpickled; a pickle holds no credentials.

    Every verb raises, of `hocket.native.errors`: `StoreConfigError` for a key or setting that cannot work,
    `StorePermissionError` when credentials are refused or missing, `StoreTransientError` when the store stays
    unreachable or failing for `deadline_s`, `StoreIOError` for the rest.

    Args:
        uri: Where the objects are. A relative path is taken from the working directory of now.
        endpoint: Address of the S3 service, instead of the environment's.
        region: Its region, instead of the environment's; `us-east-1` where neither is given.
        part_bytes: Bytes of one ranged GET of a larger object. Default 8 MiB.
        max_requests: Requests in flight at once, over all verbs of this process on this bucket. Default 16.
        budget_bytes: No transfer starts while the process has this much in flight. Default 256 MiB.
        timeout_s: Seconds for one request, plus one for each MiB that it carries. Default 30.
        deadline_s: Seconds for all tries of one request, plus one for each MiB. Default 120.
        max_retries: Tries after the first. Default 10.
        backoff_ms: Shortest and longest pause before a retry, drawn between half and all of it.
            Default (100, 10000).

    Example:
        >>> store = Store("memory://example")
        >>> etag = store.put("a/b", b"hello")
        >>> store.get("a/b", start=1, end=3)
        b'el'
    """

    def __new__(
        cls,
        uri: str | PathLike[str],
        *,
        endpoint: str | None = None,
        region: str | None = None,
        part_bytes: int | None = None,
        max_requests: int | None = None,
        budget_bytes: int | None = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        max_retries: int | None = None,
        backoff_ms: tuple[int, int] | None = None,
    ) -> Store: ...
    @property
    def uri(self) -> str:
        """The URI in its normal form: no slash at the end, an absolute path for a directory."""

    def get(self, key: str, *, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object, or its bytes from `start` to `end` (exclusive).

        Larger objects come by parallel ranged GETs, all pinned to one ETag.

        Raises:
            StoreNotFoundError: There is no such object.
            StoreChangedError: It was replaced while it was read.
            StoreIOError: The range does not lie within the object.
        """

    def head(self, key: str) -> ObjectMeta:
        """Return size, ETag and time of an object.

        Raises:
            StoreNotFoundError: There is no such object.
        """

    def put(
        self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Write an object whole, from any buffer, and return its ETag.

        Args:
            key: Its name.
            data: Its bytes; a `bytes` object is sent without a copy.
            if_absent: Only if the key is free.
            if_match: Only if the object still has this ETag.

        Raises:
            StoreExistsError: `if_absent`, and the key is taken.
            StoreChangedError: `if_match`, and the object has another ETag or is gone.
            StoreTransientError: Also when the answer to a conditional write was lost and the condition is now
                broken, perhaps by this very write: read the object back.
        """

    def upload(self, key: str, path: str | PathLike[str]) -> ObjectMeta:
        """Write a local file under `key`, in parts of at least 8 MiB, several at once.

        The object is visible when it is complete, and not before.

        Raises:
            StoreNotFoundError: There is no file `path`.
            StoreChangedError: The file grew or shrank while it was read; nothing was written.
        """

    def download(self, key: str, path: str | PathLike[str]) -> ObjectMeta:
        """Write an object into the file `path`, its parts in place: sync and rename are the caller's.

        Raises:
            StoreNotFoundError: There is no such object, or no directory for `path`.
            StoreChangedError: It was replaced while it was read; the file's content is then undefined.
        """

    def list(self, prefix: str = "") -> _list[ObjectMeta]:
        """Return all objects below `prefix` (whole segments: `a` finds `a/b`, not `ab`), sorted by key."""

    def list_dirs(self, prefix: str = "") -> tuple[_list[str], _list[ObjectMeta]]:
        """Return one level below `prefix`: keys of the directories (no slash at the end), and the objects."""

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]: ...

# --- stream -----------------------------------------------------------------------------------

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
        """Name, encoding and bytes a value (or `None`) of each column, in a sample's order."""

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
    ) -> EpochOrder:
        """Plan an epoch: one pass over the shards, none over the samples.

        Raises:
            ConfigError: A size of 0, lanes that do not divide the batch, an unknown `tail`.
        """

@final
class EpochOrder:
    """The native order of one epoch: which samples each batch holds, in which order."""

    @property
    def num_batches(self) -> int:
        """Batches of the epoch, on every rank."""

    @property
    def num_dropped(self) -> int:
        """Samples that `tail="drop"` leaves out."""

    @property
    def num_repeated(self) -> int:
        """Samples that `tail="pad"` repeats."""

    def share(self, batch: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return how many samples of a batch count on a rank, and over all ranks."""

    def sample_ids(self, batch: int) -> _list[int]:
        """Return a batch's samples over all ranks, by their numbers in storage order."""

@final
class ShardCache:
    """A data set's shards on this machine: fetched whole, checked, by one process of the machine for all.

    Its locks are the kernel's and go with their process. Of this process: a forked child makes its own.

    Args:
        index: What there is.
        local: The folder; without a remote, the data set itself.
        remote: URI of the data set, if it is elsewhere.
        deadline_s: Seconds that all tries of one request may take together.
        keep_zip: Keep a downloaded compressed file beside the raw one.
        attempts: Fetches of a shard before wrong bytes are final.
        validate_hash: The digest to check; by default the quickest one that the index carries.
    """

    def __new__(
        cls,
        index: ShardIndex,
        local: str | PathLike[str],
        remote: str | None,
        *,
        deadline_s: float,
        keep_zip: bool,
        attempts: int,
        validate_hash: str | None,
    ) -> ShardCache: ...
    def take_notices(self) -> _list[str]:
        """Return, once, what happened that a person may want to know."""

    def read(
        self,
        order: EpochOrder,
        *,
        rank: int,
        world_size: int,
        first: int,
        stride: int,
        prefetch_bytes: int,
        prefetch_batches: int,
        fetch_threads: int,
    ) -> BatchReader:
        """Start reading a rank's part of batches `first`, `first + stride`, … ahead of the caller."""

@final
class BatchReader:
    """Batches of one epoch, read ahead by threads named `hocket-*` that end with it."""

    def next(self) -> tuple[int, int, int, _list[tuple[memoryview, memoryview | None]]] | None:
        """Return the next batch, or `None` after the last. Blocks; Ctrl-C ends the wait within 100 ms.

        The batch: its number, its samples that count on this rank and over all ranks, and for each column
        the bytes of all values (writable, the caller's own) and, where they differ in size, their offsets
        (uint64, one more than values).

        Raises:
            ShardNotFoundError: A shard of the index is nowhere.
            ShardCorruptError: Its bytes are not what the index says, however often fetched.
            StreamIOError: The cache folder refuses.
            StoreError: The store's own errors, as they come.
        """

    def close(self) -> None:
        """End the threads. The next `next` says `None`."""

def load_shard_index(local: str | PathLike[str], remote: str | None, *, deadline_s: float) -> bytes:
    """Return a data set's `index.json`; with a remote from there, leaving a copy in `local`.

    Raises:
        IndexNotFoundError: There is none.
    """

def hash_names() -> _list[str]:
    """Return the digests that shards may carry, the quickest to compute first."""

def seal_shard(
    folder: str | PathLike[str],
    basename: str,
    config: bytes,
    samples: _list[bytes],
    *,
    zstd_level: int | None,
    hashes: _list[str],
) -> tuple[_File, _File | None]:
    """Write one MDS shard, whole or not at all, and return what the index is to say of it.

    Returns:
        Base name, size and digests of the raw file, and of the compressed one if there is one.

    Raises:
        ConfigError: An unknown hash, a bad level, a shard of 4 GiB or more.
        StreamIOError: The folder refuses.
    """

def write_whole(path: str | PathLike[str], data: bytes) -> None:
    """Write a file durably under a temporary name, then rename it into place.

    Raises:
        StreamIOError: The folder refuses.
    """

# --- ckpt -------------------------------------------------------------------------------------
