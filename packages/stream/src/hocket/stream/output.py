"""Where a data set is written: a local folder, an object store, or both."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hocket.native import Store
from hocket.native.errors import StoreNotFoundError
from hocket.stream.errors import ConfigError, DatasetExistsError

INDEX_NAME = "index.json"

#: A local path, a URI, or both.
Place = str | os.PathLike[str] | tuple[str, str]


def is_local(location: str) -> bool:
    """Return whether a location is a path of this machine rather than a URI of a store."""
    return "://" not in location or location.startswith("file://")


def local_path(location: str) -> Path:
    """Return the path of a local location."""
    return Path(location.removeprefix("file://"))


class Output:
    """The two sides of a data set in the making.

    Args:
        out: A local path, a URI, or both as `(local, remote)`.
        keep_local: Keep the local files after they were uploaded.
        exist_ok: Replace a data set that is there.

    Raises:
        ConfigError: `out` is none of these.
        DatasetExistsError: There is a data set, and `exist_ok` is false.
    """

    def __init__(
        self, out: str | os.PathLike[str] | tuple[str, str], *, keep_local: bool, exist_ok: bool
    ) -> None:
        local, remote = _split(out)
        self._store = None if remote is None else Store(remote)
        self._is_temporary = local is None
        self._keep_local = keep_local or remote is None
        self.uri = remote if remote is not None else str(local)
        if self._store is not None:
            _make_room(self._store, exist_ok=exist_ok)
        if local is None:
            self.folder = Path(tempfile.mkdtemp(prefix="hocket-mds-"))
        else:
            self.folder = local
            _clear(local, exist_ok=exist_ok)
            local.mkdir(parents=True, exist_ok=True)

    def publish(self, name: str) -> None:
        """Upload a file that is whole in `folder`, and forget the local one unless it is to be kept."""
        if self._store is None:
            return
        path = self.folder / name
        self._store.upload(name, path)
        if not self._keep_local:
            path.unlink()

    def close(self) -> None:
        """Leave nothing temporary behind."""
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def _split(out: Place) -> tuple[Path | None, str | None]:
    if isinstance(out, tuple):
        if len(out) != 2 or not all(isinstance(side, str) for side in out) or not is_local(out[0]):
            raise ConfigError(f"`out` is {out!r}: expected a path, a URI, or `(local path, remote URI)`")
        return local_path(out[0]), out[1]
    location = os.fspath(out)
    return (local_path(location), None) if is_local(location) else (None, location)


def _make_room(store: Store, *, exist_ok: bool) -> None:
    """Take away an old index, so that it never describes new shards."""
    try:
        store.head(INDEX_NAME)
    except StoreNotFoundError:
        return
    if not exist_ok:
        raise DatasetExistsError(f"`{store.uri}` holds a data set: choose another or give `exist_ok=True`")
    store.delete(INDEX_NAME)


def _clear(folder: Path, *, exist_ok: bool) -> None:
    """Make room in a folder: of an old data set only its own files, and its index first."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not exist_ok:
        raise DatasetExistsError(f"`{folder}` is not empty: choose another folder or give `exist_ok=True`")
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for path in folder.glob("shard.*"):
        path.unlink()
