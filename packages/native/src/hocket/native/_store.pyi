"""The part of `_native.pyi` about object stores, and the functions that `hocket.native.credentials` calls."""

from builtins import list as _list
from os import PathLike
from typing import Any, TypedDict, final, type_check_only

from typing_extensions import Buffer

@final
class ObjectMeta:
    """Metadata of an object in a store."""

    def __new__(cls, key: str, size: int, etag: str | None, modified_ms: int) -> ObjectMeta: ...
    @property
    def key(self) -> str:
        """The key, relative to the store's own prefix."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def etag(self) -> str | None:
        """The entity tag as the store writes it (S3: with its quotes); it changes when the object does."""

    @property
    def modified_ms(self) -> int:
        """Time of the last change, in milliseconds since 1970 (UTC)."""

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
    """Return the counts of all stores of this process since it started or was forked.

    `requests` counts every attempt and `retries` those after a failure; `bytes_received` and `bytes_sent` are
    bytes of objects, including broken and repeated transfers. Local files and memory make no requests.
    `bytes_in_flight` is the number of bytes that count against `budget_bytes` now, and
    `most_bytes_in_flight` the maximum so far.
    """

def flush_log() -> None:
    """Pass the kept log of the Rust layer on to `logging`, as every call that waits does by itself."""

@final
class Store:
    """A store of objects by key, in a bucket, a local directory or memory.

    | URI | Store |
    |---|---|
    | `s3://bucket/prefix` | S3, or any S3-compatible service at `endpoint` |
    | `gs://bucket/prefix` | Google Cloud Storage |
    | `az://container/prefix`, `abfss://container@account.dfs.core.windows.net/prefix` | Azure Blob Storage |
    | `oci://bucket@namespace/prefix` | Oracle's object storage, through its S3-compatible endpoint |
    | `https://host/path` | a web server with ranged GETs; read-only, no listing; percent signs are decoded |
    | `hf://datasets/owner/name@revision/path`, `hf://owner/name` | a repository of a hub; read-only |
    | a path, `file:///dir` | a local directory |
    | `memory://name` | this process's memory |

    The object is a handle with a URI and options, without a client or a socket. It can be pickled, shared by
    threads, and used in a forked child; each process has its own `memory://` stores. Opening does no I/O.
    Every method blocks without the interpreter lock, and Ctrl-C ends its wait within 100 ms.

    Credentials and addresses, read when the store is opened or unpickled (a pickle holds none):

    - S3 and OCI: `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; a web identity's
      or container's `AWS_*`; otherwise the keys that boto3 finds (`AWS_PROFILE`, SSO, instance roles),
      renewed before they expire: see `hocket.native.credentials`. Address: `AWS_ENDPOINT_URL_S3`,
      `AWS_ENDPOINT_URL`, `S3_ENDPOINT_URL`. Region: `AWS_REGION`, `AWS_DEFAULT_REGION`, `OCI_REGION`, the
      profile's.
      `AWS_SKIP_SIGNATURE`, `AWS_REQUEST_PAYER` and `MOSAICML_STREAMING_AWS_REQUESTER_PAYS` (a list of
      buckets) have the same effect as the options.
    - GCS: `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT`, gcloud's own file, the machine's
      account; `STORAGE_EMULATOR_HOST`.
    - Azure: `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN`,
      `AZURE_STORAGE_CONNECTION_STRING`, a service principal's or workload's `AZURE_*`, the machine's
      identity.
    - A hub of Hugging Face: as `huggingface_hub` finds it, a token in `HF_TOKEN` or
      `HUGGING_FACE_HUB_TOKEN`, or in the file of a login (`HF_TOKEN_PATH`, `HF_HOME`), unless
      `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set; it is sent to the hub alone. `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
      All reads of a process are of one commit.
    - All: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`. Certificate authorities, as a file in PEM
      form: `AWS_CA_BUNDLE` in addition to the system's (S3 and OCI); `SSL_CERT_FILE` instead of them (all).

    Every method raises, of `hocket.native.errors`: `StoreConfigError` for an invalid key or setting,
    `StorePermissionError` if credentials are refused or missing, `StoreTransientError` if the store stays
    unreachable or failing for `deadline_s`, `StoreIOError` for other failures.

    Args:
        uri: Location of the objects. A relative path is resolved against the current working directory.
        endpoint: Address of the service, instead of the environment's; `http://` is allowed.
        region: Region (S3, OCI), instead of the environment's; `us-east-1` if there is none.
        path_style: Whether the bucket is part of the path of an S3 address, instead of the host name.
            Default: true, except on AWS itself.
        anonymous: Do not sign requests; for public buckets.
        requester_pays: Accept the request charges of an S3 bucket of another account.
        part_bytes: Bytes of one ranged GET of a larger object. Default 8 MiB.
        max_requests: Requests in flight at once, over all verbs of this process on this bucket. Default 16.
        budget_bytes: Number of bytes in flight in the process at which no further transfer starts. Default
            256 MiB.
        timeout_s: Seconds until a response begins, plus one per MiB transferred. Connecting may take at most
            5 of them. Default 30.
        deadline_s: Seconds for all attempts of one request, plus one per MiB once the transfer has begun.
            Default 120.
        max_retries: Number of attempts after the first. Default 10.
        backoff_ms: Shortest and longest pause before a retry; the pause is drawn between half and all of it.
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
        """The URI in normal form: no trailing slash, an absolute path for a directory."""

    def pinned_uri(self) -> str | None:
        """Return the URI with the commit that the revision is now; None for a store without revisions.

        A branch or tag of a hub's repository may move; a commit never changes.

        Raises:
            StoreNotFoundError: There is no such repository or revision.
        """

    def get(self, key: str, *, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object, or its bytes from `start` to `end` (exclusive).

        Larger objects are read by parallel ranged GETs, all pinned to one ETag.

        Raises:
            StoreNotFoundError: There is no such object.
            StoreChangedError: The object was replaced while it was read.
            StoreIOError: The range is not within the object.
        """

    def head(self, key: str) -> ObjectMeta:
        """Return the size, ETag and time of an object.

        Raises:
            StoreNotFoundError: There is no such object.
        """

    def put(
        self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Write a whole object from any buffer and return its ETag.

        Args:
            key: The key.
            data: The content; a `bytes` object is sent without a copy.
            if_absent: Write only if the key does not exist.
            if_match: Write only if the object still has this ETag.

        Raises:
            StoreExistsError: `if_absent` is set and the key exists.
            StoreChangedError: `if_match` is set and the object has another ETag or is gone.
            StoreTransientError: Also if the response to a conditional write was lost and the condition no
                longer holds, possibly because of this very write: read the object back.
        """

    def upload(self, key: str, path: str | PathLike[str]) -> ObjectMeta:
        """Upload a local file under `key`, in concurrent parts of at least 8 MiB.

        The object becomes visible only when it is complete.

        Raises:
            StoreNotFoundError: The file `path` does not exist.
            StoreChangedError: The file grew or shrank while it was read; nothing was written.
        """

    def download(self, key: str, path: str | PathLike[str]) -> ObjectMeta:
        """Download an object into the file `path`, in place; the caller syncs and renames the file.

        Raises:
            StoreNotFoundError: There is no such object, or no directory for `path`.
            StoreChangedError: The object was replaced while it was read; the file's content is undefined.
        """

    def list(self, prefix: str = "") -> _list[ObjectMeta]:
        """Return all objects below `prefix` (whole segments: `a` matches `a/b`, not `ab`), sorted by key."""

    def list_dirs(self, prefix: str = "") -> tuple[_list[str], _list[ObjectMeta]]:
        """Return one level below `prefix`: keys of the directories (no trailing slash), and the objects."""

    def delete(self, key: str) -> None:
        """Delete an object; a missing object is not an error."""

    def counters(self) -> _Counts:
        """Return the counts of this handle and its copies in this process; see `hocket.native.counters`."""

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]: ...

# --- credentials: for `hocket.native.credentials` alone -----------------------------------------

def credentials_claim(profile: str) -> bool:
    """Claim the lookup of keys for `profile`; false if no request needs them or it is already claimed."""

def credentials_used(profile: str) -> bool:
    """Return whether requests used the keys since the last call or wait for new ones; else end the claim."""

def credentials_rest(profile: str, pause_s: float) -> bool:
    """Sleep for `pause_s` without the interpreter lock; return whether a store rejected the keys.

    Returns as soon as a store rejects keys as expired that should still be valid.
    """

def credentials_provide(
    profile: str,
    *,
    key_id: str,
    secret_key: str,
    token: str | None,
    expires_s: float | None,
) -> None:
    """Set the keys for the requests of this process, valid until `expires_s` (seconds since 1970)."""

def credentials_fail(profile: str, reason: str, *, is_provider_missing: bool = False) -> None:
    """Fail the requests that wait for keys of `profile` with `reason`; the next request starts a new lookup.

    If `is_provider_missing` (boto3 is not installed), requests of the default chain query the metadata
    service of an EC2 instance themselves.
    """
