"""The Rust extension: one function per verb, none of which holds the interpreter lock while bytes move."""

from builtins import list as _list
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, final, type_check_only

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

@type_check_only
class _Counts(TypedDict):
    requests: int
    retries: int
    bytes_received: int
    bytes_sent: int

@type_check_only
class _ProcessCounts(_Counts):
    bytes_in_flight: int
    most_bytes_in_flight: int

def counters() -> _ProcessCounts:
    """Return what all stores of this process did since it began, or since it was forked.

    `requests` counts every try and `retries` those after a failure; `bytes_received` and `bytes_sent` are
    bytes of objects, broken and repeated transfers included. Local files and memory make no requests.
    `bytes_in_flight` is what counts against `budget_bytes` now, and `most_bytes_in_flight` the most there
    ever was.
    """

@final
class Store:
    """Objects by key, in a bucket, a local directory or memory.

    | URI | what it is |
    |---|---|
    | `s3://bucket/prefix` | S3, and by `endpoint` whatever speaks it |
    | `gs://bucket/prefix` | Google Cloud Storage |
    | `az://container/prefix`, `abfss://container@account.dfs.core.windows.net/prefix` | Azure Blob Storage |
    | `oci://bucket@namespace/prefix` | Oracle's object storage, by its S3-compatible endpoint |
    | `https://host/path` | a web server that knows ranges; read-only, not listed; percent signs are decoded |
    | a path, `file:///dir` | a local directory |
    | `memory://name` | this process's memory |

    A handle: URI and options, no client and no socket. It pickles, goes to threads, and stays good in a
    forked child; `memory://` stores are each process's own. Opening does no I/O. Every verb blocks without
    the interpreter lock, and Ctrl-C ends its wait within 100 ms.

    Credentials and addresses, read when the store is opened or unpickled (a pickle holds none):

    - S3 and OCI: `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; a web identity's
      or container's `AWS_*`; else whatever boto3 finds (`AWS_PROFILE`, SSO, instance roles), renewed before
      it expires: see `hocket.native.credentials`. Address: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`,
      `S3_ENDPOINT_URL`. Region: `AWS_REGION`, `AWS_DEFAULT_REGION`, `OCI_REGION`, the profile's.
      `AWS_SKIP_SIGNATURE`, `AWS_REQUEST_PAYER` and `MOSAICML_STREAMING_AWS_REQUESTER_PAYS` (a list of
      buckets) do what the options do.
    - GCS: `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT`, gcloud's own file, the machine's
      account; `STORAGE_EMULATOR_HOST`.
    - Azure: `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN`,
      `AZURE_STORAGE_CONNECTION_STRING`, a service principal's or workload's `AZURE_*`, the machine's
      identity.
    - All: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`. Authorities beside the system's: S3 and OCI,
      `AWS_CA_BUNDLE`, a file of certificates in PEM form; instead of them, for all, `SSL_CERT_FILE`.

    Every verb raises, of `hocket.native.errors`: `StoreConfigError` for a key or setting that cannot work,
    `StorePermissionError` when credentials are refused or missing, `StoreTransientError` when the store stays
    unreachable or failing for `deadline_s`, `StoreIOError` for the rest.

    Args:
        uri: Where the objects are. A relative path is taken from the working directory of now.
        endpoint: Address of the service, instead of the environment's; `http://` is allowed.
        region: Region (S3, OCI), instead of the environment's; `us-east-1` where there is none.
        path_style: Whether the bucket stands in the path of an S3 address, and not in the host's name.
            Default: it does, except on AWS itself.
        anonymous: Do not sign requests: for public buckets.
        requester_pays: Agree to pay for requests to somebody else's S3 bucket.
        part_bytes: Bytes of one ranged GET of a larger object. Default 8 MiB.
        max_requests: Requests in flight at once, over all verbs of this process on this bucket. Default 16.
        budget_bytes: No transfer starts while the process has this much in flight. Default 256 MiB.
        timeout_s: Seconds until an answer begins, plus one for each MiB that travels. Connecting gets 5 of
            them at most. Default 30.
        deadline_s: Seconds for all tries of one request, plus one for each MiB once bytes were on their way.
            Default 120.
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
        path_style: bool | None = None,
        anonymous: bool = False,
        requester_pays: bool = False,
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

    def counters(self) -> _Counts:
        """Return what this handle and its copies in this process did; see `hocket.native.counters`."""

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]: ...

# --- credentials: for `hocket.native.credentials` alone -----------------------------------------

def credentials_claim(profile: str) -> bool:
    """Take on the search for keys of `profile`; false where nobody waits for it, or somebody else does it."""

def credentials_used(profile: str) -> bool:
    """Return whether requests took keys since the last call; if not, the search ends until one needs them."""

def credentials_rest(profile: str, pause_s: float) -> bool:
    """Sleep without the interpreter lock; true as soon as a store called keys expired that should be good."""

def credentials_provide(
    profile: str,
    *,
    key_id: str,
    secret_key: str,
    token: str | None,
    expires_s: float | None,
    region: str | None,
) -> None:
    """Give the requests of this process keys that are good until `expires_s` (seconds since 1970)."""

def credentials_fail(profile: str, reason: str, *, is_provider_missing: bool = False) -> None:
    """Let requests that wait for keys of `profile` fail with `reason`; the next one starts a new search.

    If boto3 `is_provider_missing`, requests of the default chain ask the metadata service of an EC2 instance
    themselves.
    """

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

# --- ckpt -------------------------------------------------------------------------------------
# `uri` is the checkpoint's own folder or prefix (`/run/ep0-ba1000`, `s3://bucket/run/ep0-ba1000`); `path` a
# file inside it, as the manifest names it (`data/….safetensors`). Addresses are plain integers: the caller
# keeps the memory alive and unchanged until the call returns. Every verb releases the interpreter lock and
# wakes within 100 ms for Ctrl-C. Errors are those of `hocket.ckpt.errors`, and of `hocket.native.errors`
# where the disk or the store failed.

CKPT_BLOCK_BYTES: int
"""Bytes of a block, the unit of digest and of reading: 1 MiB of a file's data, counted from `data_start`."""

CKPT_FORMAT: int
"""The greatest format number that this build reads and the one that it writes."""

@type_check_only
class CkptFile(TypedDict):
    """A data file as the manifest lists it."""

    path: str
    size: int
    data_start: int
    header: str
    digests: str
    frames: NotRequired[str]

@type_check_only
class CkptWritten(CkptFile):
    """What `ckpt_write_file` says of the file it wrote: the manifest's record, and where each entry lies."""

    entries: dict[str, tuple[int, int]]

@type_check_only
class CkptGarbage(TypedDict):
    """Something that `ckpt_gc` removed, or would remove. `name`: `.` for a file in the prefix itself."""

    name: str
    path: str
    waste: Literal["file", "upload", "manifest", "probe", "unfinished"]
    bytes: int
    age_s: float

@type_check_only
class CkptCollected(TypedDict):
    """What `ckpt_gc` did. `skipped`: (name, reason) of checkpoints whose manifest does not read."""

    garbage: list[CkptGarbage]
    skipped: list[tuple[str, str]]

@type_check_only
class CkptListed(TypedDict):
    """One child of a prefix."""

    name: str
    status: Literal["committed", "partial", "foreign"]
    step: int | None
    created: str | None
    save_id: str | None
    format: int | None
    version: str | None
    files: int | None
    tensors: int | None
    bytes: int | None
    problem: str | None

def ckpt_write_file(
    uri: str,
    path: str,
    *,
    entries: Sequence[tuple[str, str, Sequence[int], int, int]],
    metadata: Mapping[str, str],
    sync: bool = True,
    level: int | None = None,
    background: bool = False,
) -> CkptWritten:
    """Write one data file, a plain safetensors file or a compressed one, straight from memory.

    The header is padded with spaces so that the data starts at a multiple of 4,096; entries stand by
    descending item size, then name. Bytes pass through a ring of aligned 4 MiB buffers (64 MiB at most), are
    hashed there, and go to disk by `O_DIRECT` where the file system takes it; an object store gets a
    multipart upload. Folders are made as needed. A file that fails half-way is removed.

    Args:
        uri: The checkpoint.
        path: The file inside it; created, never replaced.
        entries: (name, safetensors dtype such as `BF16`, shape, address, bytes) each; bytes = items × item
            size. An entry of no bytes may have address 0.
        metadata: The header's `__metadata__`.
        sync: Flush file and folder to the disk before returning. Without it the caller must not commit.
        level: zstd's: `path` ends with `.blocks` then, and the file is the safetensors file as zstd frames,
            one for the header and one for each block.
        background: Threads that write to a disk give way to whatever else wants the processor (on Linux).

    Returns:
        `path`, `size`, `data_start`; `header` (base64 of the XXH3-128 of the bytes before `data_start`);
        `digests` (base64 of the XXH3-128 of each block of data, in order, 16 bytes each); `entries` (name →
        (offset in the data, bytes)). Of a compressed file also `frames` (base64 of the bytes of each frame,
        32 bits little endian), while `size`, `data_start` and the digests are those of what is in it.
        XXH3-128 is always its canonical form: 16 bytes, big endian, as `xxhsum -H2` prints it.

    Raises:
        CheckpointExistsError: `path` is there already.
        ValueError: A bad entry (unknown dtype, bytes that do not fit the shape, a name twice) or a bad path.
    """

def ckpt_describe_file(
    path: str,
    *,
    entries: Sequence[tuple[str, str, Sequence[int], int, int]],
    metadata: Mapping[str, str],
    level: int | None = None,
) -> CkptWritten:
    """What `ckpt_write_file` would return for these entries; with a `level` it compresses. Writes nothing."""

def ckpt_manifest_encode(document: bytes) -> bytes:
    """Compress a manifest document (JSON, see docs/format.md) into the bytes of `checkpoint.json.zst`.

    The small first frame (format, version, save id, step, created, counts, digest of the document's frame) is
    made from the document. What `ckpt_manifest_read` would refuse is refused here, before it is committed.

    Raises:
        CheckpointCorruptError: The document breaks a rule of the format; the message says which.
        CheckpointIncompatibleError: Its format number is not one that this build writes.
    """

def ckpt_manifest_decode(manifest: bytes, *, uri: str = "") -> bytes:
    """The document inside the bytes of a manifest, after full validation. `uri` serves the messages only."""

def ckpt_manifest_read(uri: str) -> bytes:
    """Read `checkpoint.json.zst` of a checkpoint; returns its document, JSON, after full validation.

    Validated: both digests; the format number; file paths plain and inside; offsets within file sizes; chunks
    inside shapes and tiling each tensor exactly; nothing twice.

    Raises:
        CheckpointNotFoundError: There is nothing at `uri`.
        CheckpointPartialError: Data files without a manifest: never committed.
        CheckpointCorruptError: A digest or a rule does not hold.
        CheckpointIncompatibleError: A later format; the version that reads it is named.
    """

def ckpt_manifest_head(uri: str) -> bytes:
    """The first frame of a manifest, JSON, by one ranged read. Raises as `ckpt_manifest_read`."""

def ckpt_commit(
    uri: str, manifest: bytes, save_id: str, *, unfenced: bool = False, replaces: str | None = None
) -> None:
    """Write the manifest to its name if and only if none is there: this is the commit.

    Disk: data folder flushed, a temporary file written and flushed, linked to the name, the folder flushed.
    Object store: a conditional PUT. When the answer is lost or says "exists", the manifest is read back, and
    the same save id is success.

    Args:
        uri: The checkpoint.
        manifest: What `ckpt_manifest_encode` gave.
        save_id: The save id inside it.
        unfenced: Commit although the store lets two conditional writes through. Two savers then may both
            believe that they won.
        replaces: The save id of the checkpoint to replace, in one step and only if it is still that one
            (under a lock on a disk, by `If-Match` on an object store). Its files stay: remove them with
            `ckpt_delete_files`.

    Raises:
        CheckpointExistsError: Another save's checkpoint is there, and not the one to replace.
        CheckpointUnfencedError: The store does not honour conditional writes (tried once per process and
            endpoint).
    """

@final
class CkptFiles:
    """The data files of one checkpoint: their digests are decoded once, for any number of reads.

    Holds no open file; safe in threads and across forks.

    Args:
        uri: The checkpoint.
        files: Files of the manifest, or of a catalogue (which have no digests); only those that a read names
            are opened.
        check: Verify the digest of every block that a read touches.

    Raises:
        CheckpointCorruptError: The digests or frames of a file do not match its size.
    """

    def __new__(cls, uri: str, files: Sequence[CkptFile], *, check: bool = True) -> CkptFiles: ...
    def read(self, reads: Sequence[tuple[int, int, int, int]]) -> None:
        """Read byte ranges of data files into memory.

        Reads are sorted, coalesced (gap ≤ 1 MiB) and run in parallel. A block that lies wholly in one
        destination is read into it and hashed there; others go through a scratch block. Local files that are
        not cached are read into the page cache as long as all reads of this object together fit a quarter of
        the free memory, and past it from then on.

        Args:
            reads: (index in `files`, offset in the data, bytes, destination address) each. Destinations do
                not overlap.

        Raises:
            CheckpointCorruptError: A block's digest differs, or a file's size. Attributes `file` (path) and
                `offset` (in the data, of the block; None for a size) let the caller name the tensor.
                Destinations are then undefined.
            CheckpointNotFoundError: A file is gone.
        """

def ckpt_verify_file(uri: str, file: CkptFile) -> list[tuple[int, int]]:
    """Every bad block of a file, as (block, offset in the data).

    (-1, -data_start) stands for a header that differs.

    Raises:
        CheckpointNotFoundError: The file is not there.
        CheckpointCorruptError: It is shorter or longer than the manifest says.
    """

def ckpt_list(uri: str) -> list[CkptListed]:
    """What stands under a prefix, sorted by step, then created, then name; the uncommitted come first.

    `committed`: has a manifest whose first frame reads. `partial`: has our data files and no manifest.
    `foreign`: anything else that is a folder; `problem` says why where it has a manifest that does not read.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_delete(uri: str, name: str, *, dry_run: bool = False) -> None:
    """Remove the checkpoint `name` under `uri`: the manifest first, so that no instant shows a broken one.

    Takes only the manifest and files under `data/`, then the folder if it is empty.

    Args:
        uri: The prefix.
        name: The checkpoint below it.
        dry_run: Remove nothing; refuse what would be refused.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        ValueError: `name` is not one plain path component, or a symbolic link.
    """

def ckpt_delete_files(uri: str, paths: Sequence[str]) -> None:
    """Remove data files of a checkpoint that its manifest does not name any more.

    On a disk the folders go, too, where nothing else is in them.

    Raises:
        ValueError: A path is not below `data/`.
    """

def ckpt_discard_file(uri: str, path: str) -> None:
    """Remove a data file that its writer did not finish; one that is gone already is no error.

    Raises:
        CheckpointExistsError: Somebody is writing it, as far as the file system tells.
        ValueError: The path is not below `data/`.
    """

def ckpt_gc(uri: str, *, min_age_s: float, dry_run: bool = False) -> CkptCollected:
    """Remove what no checkpoint under a prefix needs: what unfinished and replaced saves left behind.

    Data files that their folder's manifest does not name, manifests that never came to their name, hidden
    files of conversions, and unfinished multipart uploads, if the youngest of their save is `min_age_s` old.
    Files that are not ours stay, and so does what has a writer.

    Args:
        uri: The prefix.
        min_age_s: Seconds. A save that takes longer is in danger.
        dry_run: Remove nothing.

    Raises:
        CheckpointNotFoundError: There is no such prefix.
    """

def ckpt_sizes(uri: str, paths: Sequence[str]) -> list[int | None]:
    """Bytes of each file as seen from here, before a commit; None where it is not there."""

def xxh3_128(buffer: bytes) -> bytes:
    """XXH3-128 of bytes, 16 bytes in canonical (big endian) form."""

# --- checkpoints of others ----------------------------------------------------------------------
# `root` is the folder or prefix that a catalogue names, `path` a file in it. Nothing in a file is executed.

def foreign_open(uri: str) -> bytes:
    """Recognise and lists a checkpoint that is not ours; returns a catalogue, JSON.

    Fields: `format` (`dcp`, `torch`, `safetensors`), `root`, `files` ([path, bytes]), `tensors` (name →
    dtype, shape, path, same_as, chunks with file, offset, length, start, size, strides, wrapped), `values`
    (name → path and tagged value), `opaque` (name → why it is not looked into), `items` (the zips of a
    distributed checkpoint: file, offset, bytes, `torch` or `zstd`, name), `integer_keyed` (paths).

    Raises:
        CheckpointNotFoundError: Nothing that is known is there.
        CheckpointUnsafeError: A pickle asks for more than data; the name it asks for is given.
        CheckpointCorruptError: It breaks a rule of its format.
        CheckpointIncompatibleError: A form of it that is not read.
    """

def foreign_locate(
    root: str, path: str, items: Sequence[tuple[int, int, str, Sequence[int]]]
) -> list[tuple[int, list[int] | None]]:
    """Find the tensors inside items of a distributed checkpoint's file, two small reads an item.

    Args:
        root: The checkpoint.
        path: The file.
        items: (offset, bytes, dtype, shape) each, as the catalogue has them.

    Returns:
        Where the first item of each tensor lies in the file, and the strides where they are not C order's.

    Raises:
        CheckpointCorruptError: An item does not hold what the metadata says.
    """

@final
class ForeignUnpacker:
    """The tensor in a compressed item, unpacked front to back; some MiB of it are in memory.

    Safe to use from several threads, one at a time.

    Args:
        root: The checkpoint.
        path: The file.
        item: Offset, bytes, dtype and shape of the item, as for `foreign_locate`.

    Raises:
        CheckpointCorruptError: The item does not hold what `.metadata` says, or is cut short.
    """

    def __new__(cls, root: str, path: str, item: tuple[int, int, str, Sequence[int]]) -> ForeignUnpacker: ...
    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, with what its strides leave between items."""

    @property
    def strides(self) -> list[int] | None:
        """Its strides in items, where they are not C order's."""

    def read(self, reads: Sequence[tuple[int, int, int]]) -> None:
        """Read ranges of the tensor's bytes: (offset, bytes, address) each.

        Those that ascend, in this call and over several, take one pass over the item; one that lies before
        the last begins another.

        Raises:
            ValueError: A range is not in it.
        """

def foreign_verify_zips(
    root: str, path: str, zips: Sequence[tuple[int, int, bool]]
) -> list[tuple[int, str, int, int, str]]:
    """Compare every member of zips in one file with its CRC-32.

    Args:
        root: The checkpoint.
        path: The file.
        zips: (offset, bytes, compressed or not) each.

    Returns:
        For each bad one: which zip, the member (empty where the zip is bad), offset, bytes, the problem.
    """

def foreign_lax_rules(root: str, path: str) -> list[str]:
    """What a safetensors file breaks of the format's text although readers take it.

    Raises:
        CheckpointCorruptError: No reader takes it.
    """

def crc32(address: int, num_bytes: int, value: int = 0) -> int:
    """CRC-32 of memory, carried on from `value`."""

@final
class CkptSink:
    """A file written front to back in pieces. It has its name when it is whole, never in place of another.

    One that is not finished leaves nothing. Where a file stands already, what comes is compared with it, and
    nothing is written.

    Args:
        uri: The folder or prefix.
        path: The file in it.
        size: Bytes that will come, exactly.
        data_start: Hash the bytes before it as the header, those after it in blocks.
        level: zstd's: compress header and blocks, a frame each. Only with `data_start`.

    Raises:
        CheckpointExistsError: Another file is there; `write` and `finish` raise it too.
    """

    def __new__(
        cls, uri: str, path: str, *, size: int, data_start: int | None = None, level: int | None = None
    ) -> CkptSink: ...
    @property
    def found(self) -> bool:
        """Whether the file stood there already."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def write_from(self, address: int, num_bytes: int) -> None:
        """Append memory that stays alive and unchanged until this returns."""

    def finish(self) -> CkptFile | None:
        """Make the file durable and visible; the manifest's record of it, where it was hashed.

        Raises:
            CheckpointExistsError: The name was taken meanwhile.
            ValueError: Not all bytes came.
        """

    def close(self) -> None:
        """Give an unfinished file up."""
