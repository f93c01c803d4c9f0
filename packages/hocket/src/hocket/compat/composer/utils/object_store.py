"""Object stores, as `composer.utils`, over `hocket.native.Store`."""

from __future__ import annotations

import abc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hocket.compat.composer.utils.names import parse_uri
from hocket.native import Store
from hocket.native.errors import StoreTransientError
from hocket.trainer.errors import TrainerConfigError

#: Raised when a store stays unreachable.
ObjectStoreTransientError = StoreTransientError

Progress = Callable[[int, int], None]


class ObjectStore(abc.ABC):
    """A store of objects by name, in a bucket or elsewhere; a script may pass a subclass of its own."""

    @abc.abstractmethod
    def get_uri(self, object_name: str) -> str:
        """Return the URI of an object."""

    @abc.abstractmethod
    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a file."""

    @abc.abstractmethod
    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes."""

    @abc.abstractmethod
    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Write an object to a file."""

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of objects that start with a prefix; a script's own store may omit this method."""
        raise NotImplementedError(f"`{type(self).__name__}` does not list its objects")

    def close(self) -> None:  # noqa: B027 - a store may have nothing to close
        """Release the store's resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bucket(ObjectStore):
    """Objects under a prefix of a bucket, or in a folder.

    Args:
        uri: The bucket, folder or `memory://name`.
        prefix: Prefix of every object's name.
        **options: Options of `hocket.native.Store`.
    """

    def __init__(self, uri: str, prefix: str = "", **options: Any) -> None:
        self._uri = uri.rstrip("/")
        self._store = Store(self._uri, **options)
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def get_key(self, object_name: str) -> str:
        """Return the key of an object in the bucket."""
        return f"{self.prefix}{object_name}"

    def get_uri(self, object_name: str) -> str:
        """Return the URI of an object."""
        return f"{self._uri}/{self.get_key(object_name)}"

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a file; `callback` gets the bytes sent and the size, once at the end."""
        size = self._store.upload(self.get_key(object_name), filename).size
        if callback is not None:
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: If there is no such object.
        """
        return self._store.head(self.get_key(object_name)).size

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Write an object to a file; `callback` gets the bytes received and the size, once at the end.

        Raises:
            FileExistsError: If the file is there and `overwrite` is not set.
            FileNotFoundError: If there is no such object.
        """
        _check_free(filename, overwrite=overwrite)
        size = self._store.download(self.get_key(object_name), filename).size
        if callback is not None:
            callback(size, size)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of objects that start with a prefix."""
        key_prefix = self.get_key(prefix or "")
        folder = key_prefix.rpartition("/")[0]
        entries = self._store.list(folder)
        return [one.key.removeprefix(self.prefix) for one in entries if one.key.startswith(key_prefix)]


class S3ObjectStore(_Bucket):
    """A bucket of S3, or of a service with the same protocol.

    Keys are read from the environment and boto3's configuration, as `hocket.native.Store` lists them.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        client_config: Any = None,
        transfer_config: Any = None,
    ) -> None:
        if aws_access_key_id or aws_secret_access_key or aws_session_token:
            raise TrainerConfigError(
                "keys are given to `S3ObjectStore`; expected them in the environment as "
                "`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or in a profile that `AWS_PROFILE` names"
            )
        del client_config, transfer_config  # retries and part sizes are the store's own
        super().__init__(
            f"s3://{bucket.removeprefix('s3://')}", prefix, region=region_name, endpoint=endpoint_url
        )


class GCSObjectStore(_Bucket):
    """A bucket of Google Cloud Storage."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket.removeprefix('gs://')}", prefix)


class OCIObjectStore(_Bucket):
    """A bucket of Oracle's object storage, `bucket@namespace`."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"oci://{bucket.removeprefix('oci://')}", prefix)


_BACKENDS: dict[str, Callable[..., ObjectStore]] = {
    "s3": S3ObjectStore,
    "gs": GCSObjectStore,
    "gcs": GCSObjectStore,
    "oci": OCIObjectStore,
}


def build_remote_backend(remote_backend_name: str, backend_kwargs: dict[str, Any]) -> ObjectStore:
    """Make the object store of a scheme, such as `s3`.

    Raises:
        TrainerConfigError: If the scheme has no object store.
    """
    if remote_backend_name not in _BACKENDS:
        schemes = ", ".join(f"`{name}`" for name in _BACKENDS)
        raise TrainerConfigError(
            f"there is no object store `{remote_backend_name}`; expected one of {schemes}"
        )
    return _BACKENDS[remote_backend_name](**backend_kwargs)


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the object store of a URI's bucket; None for a local path."""
    backend, bucket, _ = parse_uri(uri)
    if not backend or backend == "file":
        return None
    if backend in _BACKENDS:
        return _BACKENDS[backend](bucket)
    return _Bucket(f"{backend}://{bucket}")


def validate_credentials(remote_backend: ObjectStore, remote_file_name_to_test: str) -> None:
    """Check that a store can be written to, by storing a small object under a name."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "object"
        path.write_text("credentials validated")
        remote_backend.upload_object(remote_file_name_to_test, path)


def get_file(
    path: str,
    destination: str | os.PathLike[str],
    object_store: Any = None,
    overwrite: bool = False,
    progress_bar: bool = True,  # noqa: ARG001 - Composer's signature
) -> None:
    """Fetch a file by its path, by its URI, or by its name in an object store or logger.

    For a local path, the destination becomes a symbolic link, or a copy where links are not possible.

    Raises:
        FileNotFoundError: If there is no such file.
        FileExistsError: If the destination is there and `overwrite` is not set.
    """
    if isinstance(object_store, ObjectStore):
        object_store.download_object(path, destination, overwrite=overwrite)
        return
    if object_store is not None:
        object_store.download_file(path, str(destination), overwrite=overwrite)
        return
    store = maybe_create_object_store_from_uri(path)
    if store is not None:
        store.download_object(parse_uri(path)[2], destination, overwrite=overwrite)
        return
    source = os.path.abspath(path.removeprefix("file://"))
    if not os.path.exists(source):
        raise FileNotFoundError(f"there is no file `{path}`")
    _check_free(destination, overwrite=overwrite)
    if os.path.lexists(destination):
        os.remove(destination)
    try:
        os.symlink(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _check_free(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"`{os.fspath(path)}` is there; give another path, or `overwrite=True`")
