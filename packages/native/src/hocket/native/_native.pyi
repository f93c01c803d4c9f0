"""The Rust extension: one function per verb, none of which holds the interpreter lock while bytes move."""

from builtins import list as _list
from os import PathLike
from typing import Any, final

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
    at each call.

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

# --- ckpt -------------------------------------------------------------------------------------
