"""The location of a data set and of its cache."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from hocket.stream.errors import ConfigError
from hocket.stream.settings.places import check_path, find_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLocation:
    """The remote and the local side of a data set. Paths are resolved, so a folder has one name."""

    local: Path
    """The cache folder; without a remote, the data set itself."""

    remote: str | None
    """URI of the data set; None if it is read in place."""

    @property
    def origin(self) -> str:
        """The name of the data set in messages."""
        return self.remote or str(self.local)


def resolve_location(
    remote: str | os.PathLike[str] | None, local: str | os.PathLike[str] | None, *, split: str | None
) -> DatasetLocation:
    """Return the location of a data set and of its cache.

    A remote that is a local path is read in place unless `local` is another folder. Without `local`, shards
    from a store are cached in the user's cache folder, under a name derived from the URI.

    Raises:
        ConfigError: Neither side is given, `local` is a URI, or `split` is outside of the data set.
    """
    if remote is None and local is None:
        raise ConfigError(
            "neither `remote` nor `local` is given: expected the location of the data set, such as `s3://b/p`"
        )
    cache = None if local is None else find_folder(local)
    if local is not None and cache is None:
        raise ConfigError(f"`local` is `{local}`: expected a local path; pass URIs as `remote`")
    if split is not None and (Path(split).is_absolute() or ".." in Path(split).parts):
        raise ConfigError(f"`split` is `{split}`: expected a folder within the data set")
    subfolder = split or ""
    folder = None if cache is None else _resolve(cache / subfolder)
    source = None if remote is None else find_folder(remote)
    if source is not None:
        path = _resolve(source / subfolder)
        if folder is None or _is_same(folder, path):
            return DatasetLocation(local=path, remote=None)
        return DatasetLocation(local=folder, remote=str(path))
    if remote is None:
        return DatasetLocation(local=folder or Path(), remote=None)
    uri = os.fspath(remote)
    if folder is None:
        folder = _resolve(_default_cache(uri) / subfolder)
    return DatasetLocation(local=folder, remote=f"{uri.rstrip('/')}/{subfolder}".rstrip("/"))


def _resolve(path: Path) -> Path:
    return Path(check_path(os.path.realpath(path)))


def _is_same(first: Path, second: Path) -> bool:
    """Return whether two paths are the same folder. A cache in its own source would evict the source."""
    if first.exists() and second.exists():
        return first.samefile(second)
    return first == second


def _default_cache(uri: str) -> Path:
    """Return a cache folder in the user's home, which other users' permissions cannot block."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hocket" / "stream" / hashlib.sha256(uri.encode()).hexdigest()[:16]
