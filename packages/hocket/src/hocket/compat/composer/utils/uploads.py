"""Uploads of files beside the training, as `composer.utils` and `composer.loggers` offer them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

from hocket.compat.composer.utils.names import format_name_with_dist, parse_uri
from hocket.compat.composer.utils.object_store import (
    ObjectStore,
    build_remote_backend,
    maybe_create_object_store_from_uri,
)
from hocket.trainer import Logger, LoggerDestination, State
from hocket.trainer.errors import TrainerConfigError


class RemoteFilesExistingCheckStatus(Enum):
    """The outcome of a wait for remote files."""

    EXIST = 1
    TIMEOUT = 2
    ERROR = 3


def _open(uri: str, options: dict[str, Any] | None) -> tuple[ObjectStore, str]:
    backend, bucket, prefix = parse_uri(uri)
    if options:
        return build_remote_backend(backend, {"bucket": bucket, **options}), prefix
    store = maybe_create_object_store_from_uri(uri)
    if store is None:
        raise TrainerConfigError(f"`{uri}` is no URI of an object store; expected one such as `s3://bucket`")
    return store, prefix


class RemoteUploader:
    """An uploader of files with threads of its own.

    Args:
        remote_folder: The URI that names start in.
        backend_kwargs: Options of the object store.
        num_concurrent_uploads: Uploads at once.
        num_attempts: Accepted for Composer's users: the store retries by itself.
    """

    def __init__(
        self,
        remote_folder: str,
        backend_kwargs: dict[str, Any] | None = None,
        num_concurrent_uploads: int = 2,
        num_attempts: int = 3,
    ) -> None:
        del num_attempts
        self.remote_folder = remote_folder
        self._store, self.path = _open(remote_folder, backend_kwargs)
        self._threads = ThreadPoolExecutor(num_concurrent_uploads, thread_name_prefix="hocket-upload")
        self._stop = threading.Event()
        self._uploads: list[Future[Any]] = []

    @property
    def remote_backend(self) -> ObjectStore:
        """The object store."""
        return self._store

    def init(self) -> None:
        """Do nothing: a store is open from the start."""

    def upload_file_async(
        self,
        remote_file_name: str,
        file_path: str | os.PathLike[str],
        overwrite: bool,
    ) -> Future[str]:
        """Start to upload a file; the future's result is the remote name.

        The upload raises `FileExistsError` if the object is there and `overwrite` is not set.
        """
        upload = self._threads.submit(self._upload, remote_file_name, Path(file_path), overwrite=overwrite)
        self._uploads.append(upload)
        return upload

    def _upload(self, name: str, path: Path, *, overwrite: bool) -> str:
        if not overwrite and _exists(self._store, name):
            raise FileExistsError(f"`{self._store.get_uri(name)}` is there; give `overwrite=True`")
        self._store.upload_object(name, path)
        return name

    def check_workers(self) -> None:
        """Raise the error of an upload that failed."""
        ended = [upload for upload in self._uploads if upload.done()]
        self._uploads = [upload for upload in self._uploads if not upload.done()]
        for upload in ended:
            upload.result()

    def wait(self) -> None:
        """Wait for all uploads; raise the error of one that failed."""
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.result()

    def wait_and_close(self) -> None:
        """Wait for all uploads, and end the threads."""
        try:
            self.wait()
        finally:
            self._stop.set()
            self._threads.shutdown()

    def check_remote_files_exist_async(
        self,
        remote_checkpoint_file_names: Sequence[str],
        max_wait_time_in_seconds: float = 3600,
        wait_before_next_try_in_seconds: float = 30,
    ) -> Future[RemoteFilesExistingCheckStatus]:
        """Start a wait until all of the given objects exist."""

        def check() -> RemoteFilesExistingCheckStatus:
            deadline = time.monotonic() + max_wait_time_in_seconds
            missing = list(remote_checkpoint_file_names)
            while missing := [name for name in missing if not _exists(self._store, name)]:
                if self._stop.wait(wait_before_next_try_in_seconds) or time.monotonic() >= deadline:
                    return RemoteFilesExistingCheckStatus.TIMEOUT
            return RemoteFilesExistingCheckStatus.EXIST

        return self._threads.submit(check)


def _exists(store: ObjectStore, name: str) -> bool:
    try:
        store.get_object_size(name)
    except FileNotFoundError:
        return False
    return True


class RemoteUploaderDownloader(LoggerDestination):
    """A logger that stores files in an object store; it runs on a thread of its own, as every logger.

    Args:
        bucket_uri: URI of the bucket, such as `s3://bucket`.
        backend_kwargs: Options of the object store.
        file_path_format_string: Format of an object's name, with the fields `{remote_file_name}`,
            `{run_name}` and those of ranks.
        **arguments: Composer's other arguments, which concern its processes for uploads.
    """

    rank_zero_only = False

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: dict[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        **arguments: Any,
    ) -> None:
        accepted = {"num_concurrent_uploads", "upload_staging_folder", "use_procs", "num_attempts"}
        if unknown := sorted(set(arguments) - accepted):
            raise TrainerConfigError(f"`RemoteUploaderDownloader` has no argument `{unknown[0]}`")
        self.bucket_uri = bucket_uri
        self._store, self._prefix = _open(bucket_uri, backend_kwargs)
        self._template = file_path_format_string
        self._run_name = ""

    @property
    def remote_backend(self) -> ObjectStore:
        """The object store."""
        return self._store

    def init(self, state: State, logger: Logger) -> None:
        """Record the run's name."""
        self._run_name = state.run_name

    def can_upload_files(self) -> bool:
        """Return True."""
        return True

    def upload_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store a file.

        Raises:
            FileExistsError: If the object is there and `overwrite` is not set.
        """
        name = self._name(remote_file_name)
        if not overwrite and _exists(self._store, name):
            raise FileExistsError(f"`{self._store.get_uri(name)}` is there; give `overwrite=True`")
        self._store.upload_object(name, file_path)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Fetch a file."""
        self._store.download_object(self._name(remote_file_name), destination, overwrite=overwrite)

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return the URI that a file has, or will have."""
        return self._store.get_uri(self._name(remote_file_name))

    def _name(self, remote_file_name: str) -> str:
        name = format_name_with_dist(self._template, self._run_name, remote_file_name=remote_file_name)
        return f"{self._prefix.rstrip('/')}/{name}".lstrip("/")


def maybe_create_remote_uploader_downloader_from_uri(
    uri: str, loggers: Sequence[Any]
) -> RemoteUploaderDownloader | None:
    """Return a logger that stores files in a URI's bucket; None for a path, or if one of `loggers` does."""
    backend, bucket, _ = parse_uri(uri)
    bucket_uri = f"{backend}://{bucket}"
    present = [one.bucket_uri.rstrip("/") for one in loggers if isinstance(one, RemoteUploaderDownloader)]
    return None if not backend or bucket_uri in present else RemoteUploaderDownloader(bucket_uri)
