"""The part of `_native.pyi` about object stores, and the keys that `hocket.native.credentials` passes."""

from builtins import list as _list
from os import PathLike
from typing import Any, TypedDict, final, type_check_only

from typing_extensions import Buffer

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
