"""Where a data set is read from, and where its shards are kept."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from hocket.stream.errors import ConfigError
from hocket.stream.output import is_local, local_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Both sides of a data set. Paths are resolved, so that one folder has one name."""

    local: Path
    """The cache; without a remote, the data set itself."""

    remote: str | None
    """URI of the data set, or None where it is read in place."""

    @property
    def origin(self) -> str:
        """What messages call it."""
        return self.remote or str(self.local)


def resolve_location(
    remote: str | os.PathLike[str] | None, local: str | os.PathLike[str] | None, *, split: str | None
) -> Location:
    """Return where to read from and where to keep.

    A remote that is a path of this machine is read in place unless `local` names another folder. Without
    `local`, shards of a store are kept in the user's cache folder, under a name made of the URI.

    Raises:
        ConfigError: Neither side is given, `local` is a URI, or `split` leaves the data set.
    """
    if remote is None and local is None:
        raise ConfigError(
            "neither `remote` nor `local` is given: expected where the data set is, such as `s3://b/p`"
        )
    if local is not None and not is_local(os.fspath(local)):
        raise ConfigError(f"`local` is `{local}`: expected a path of this machine; URIs belong in `remote`")
    if split is not None and (Path(split).is_absolute() or ".." in Path(split).parts):
        raise ConfigError(f"`split` is `{split}`: expected a folder within the data set")
    below = split or ""
    uri = None if remote is None else os.fspath(remote)
    kept = None if local is None else _resolve(local_path(os.fspath(local)) / below)
    if uri is not None and is_local(uri):
        path = _resolve(local_path(uri) / below)
        if kept is None or _is_same(kept, path):
            return Location(local=path, remote=None)
        return Location(local=kept, remote=str(path))
    if uri is None:
        return Location(local=kept or Path(), remote=None)
    if kept is None:
        kept = _resolve(_default_cache(uri) / below)
    return Location(local=kept, remote=f"{uri.rstrip('/')}/{below}".rstrip("/"))


def _resolve(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one folder, by whatever mount: a cache of itself would evict its source."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one == other


def _default_cache(uri: str) -> Path:
    """A folder of this user's own: nobody else's permissions or leftovers are in the way."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hocket" / "stream" / hashlib.sha256(uri.encode()).hexdigest()[:16]
