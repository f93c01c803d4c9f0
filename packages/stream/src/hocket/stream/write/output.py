"""The output location of a data set: a local folder, an object store, or both."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hocket.native import Store, _native
from hocket.native.errors import StoreNotFoundError
from hocket.native.paths import read_only_problem
from hocket.stream.errors import ConfigError, DatasetExistsError, IndexNotFoundError, StreamIOError
from hocket.stream.settings.places import check_path, find_folder

INDEX_NAME = "index.json"

#: A local path, a URI, or both.
Side = str | os.PathLike[str]
Place = Side | tuple[Side, Side]

_SHARD_NAME = re.compile(r"shard\.(\d+)\.")
#: Keys of an index entry that describe files.
FILE_KEYS = ("raw_data", "zip_data", "raw_meta", "zip_meta")


class DatasetOutput:
    """The location, or the two locations, to which a data set is written, and its index there.

    Args:
        out: A local path, a URI, or both as `(local, remote)`.
        keep_local: If `out` is both, also write the local side.
        retry: Number of retries of a request to the store.

    Raises:
        ConfigError: `out` is none of these.
    """

    def __init__(self, out: Place, *, keep_local: bool = False, retry: int | None = None) -> None:
        local, remote = split_place(out)
        self.store = None if remote is None else Store(remote, max_retries=retry)
        self.folder = local if remote is None or keep_local else None
        self.uri = remote if remote is not None else str(local)
        self._etag: str | None = None

    def check_writable(self) -> None:
        """Check that files can be created, as far as this is known before the first one is.

        Raises:
            ConfigError: The remote side is on a web server or a hub, which are only read.
            StreamIOError: The local folder cannot be created or written to.
        """
        if self.store is not None and (problem := read_only_problem(self.store.uri)) is not None:
            raise ConfigError(problem)
        if self.folder is None:
            return
        folder = Path(Store(self.folder).uri)
        while not os.path.lexists(folder):
            folder = folder.parent
        if not os.path.isdir(folder):
            problem = f"`{folder}` is a file or a dangling link"
        elif not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            problem = f"the folder `{folder}` cannot be written to"
        else:
            return
        raise StreamIOError(f"`{self.folder}`: {problem}; pass a writable folder with free space as `out`")

    def make_room(self, *, exist_ok: bool, dry_run: bool = False) -> None:
        """Check that the location is free. With `exist_ok`, delete its index, then the shards it lists.

        Args:
            exist_ok: Whether the location may be in use.
            dry_run: Delete nothing.

        Raises:
            DatasetExistsError: The location is in use, and `exist_ok` is false.
        """
        for side in self.sides():
            old_index = read_object(side, INDEX_NAME)
            if old_index is None and (side is self.store or side.list_dirs() == ([], [])):
                continue
            if not exist_ok:
                problem = "holds a data set and is not empty" if old_index is not None else "is not empty"
                raise DatasetExistsError(
                    f"`{side.uri}` {problem}: choose another place, or give `exist_ok=True` to replace it"
                )
            if dry_run:
                continue
            side.delete(INDEX_NAME)
            for name in _own_files(old_index):
                side.delete(name)

    def open_existing(self) -> tuple[list[dict[str, Any]], int]:
        """Return the shards of the existing data set, and the first free shard number.

        Numbers of files that are not in the index, left by a writer that died, are not used again.

        Raises:
            IndexNotFoundError: There is no data set.
            IndexCorruptError: The index is not valid.
        """
        main = self.sides()[0]
        old_index = read_object(main, INDEX_NAME)
        if old_index is None:
            raise IndexNotFoundError(
                f"there is no index at `{self.uri}`: expected a data set to append to; leave `append` out to "
                "create one"
            )
        _native.ShardIndex.parse(old_index, f"{self.uri}/{INDEX_NAME}")
        self._etag = main.head(INDEX_NAME).etag
        if read_object(main, INDEX_NAME) != old_index:
            raise DatasetExistsError(f"`{self.uri}` is being written by another process: try again later")
        shards: list[dict[str, Any]] = json.loads(old_index)["shards"]
        names = [
            *_own_files(old_index),
            *(meta.key for side in self.sides() for meta in side.list_dirs()[1]),
        ]
        numbers = [int(match[1]) for name in names if (match := _SHARD_NAME.match(name))]
        return shards, max(numbers, default=-1) + 1

    def publish(self, shards: list[dict[str, Any]]) -> None:
        """Write the index atomically, which publishes the data set; on the store last.

        Raises:
            StoreChangedError: Another writer has changed the index since `open_existing`.
        """
        data = json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode()
        main, *others = self.sides()
        if self._etag is not None:
            # First, so that a writer that loses a race changes nothing.
            main.put(INDEX_NAME, data, if_match=self._etag)
        for side in others if self._etag is not None else [*others, main]:
            side.put(INDEX_NAME, data)

    def sides(self) -> list[Store]:
        """Return the stores to write to; the first one decides whether a write succeeds."""
        local = [] if self.folder is None else [Store(self.folder)]
        return local if self.store is None else [self.store, *local]


def split_place(out: Place) -> tuple[Path | None, str | None]:
    """Return the local and the remote side of an output location.

    Raises:
        ConfigError: It is neither a path, nor a URI, nor both.
    """
    if isinstance(out, (tuple, list)):
        is_pair = len(out) == 2 and all(isinstance(side, str | os.PathLike) for side in out)
        folder = find_folder(out[0]) if is_pair else None
        if folder is None:
            raise ConfigError(f"`out` is {out!r}: expected a path, a URI, or `(local path, remote URI)`")
        return folder, check_path(os.fspath(out[1]))
    folder = find_folder(out)
    return folder, os.fspath(out) if folder is None else None


def below(out: Place, folder: str) -> Place:
    """Return the place of a folder within a place, on both of its sides if it has two."""
    local, remote = split_place(out)
    sides = [f"{side}/{folder}" for side in (local, remote) if side is not None]
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def move_files(shards: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Return entries of an index with the names of their files within a folder."""
    return [
        shard
        | {
            key: shard[key] | {"basename": f"{folder}/{shard[key]['basename']}"}
            for key in FILE_KEYS
            if shard.get(key)
        }
        for shard in shards
    ]


def read_object(side: Store, key: str) -> bytes | None:
    """Return an object; None if there is none."""
    try:
        return side.get(key)
    except StoreNotFoundError:
        return None


def _own_files(index: bytes | None) -> list[str]:
    """Return the files of an index that are in its own folder. Files of merged data sets belong to others."""
    try:
        shards = json.loads(index or b"{}").get("shards", [])
        files = [shard.get(key) for shard in shards for key in FILE_KEYS]
        names = [file["basename"] for file in files if file]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str) and _SHARD_NAME.match(name) and "/" not in name]
