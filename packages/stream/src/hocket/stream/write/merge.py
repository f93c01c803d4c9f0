"""Merging of several data sets under one index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hocket.native import Store, _native
from hocket.native.errors import StoreNotFoundError
from hocket.stream.errors import ConfigError, IndexCorruptError, IndexNotFoundError
from hocket.stream.write.output import INDEX_NAME, DatasetOutput, Place, move_files, split_place


def merge_index(
    source: Place | list[Place],
    out: Place | None = None,
    *,
    keep_local: bool = True,
    download_timeout: float = 60.0,
) -> None:
    """Write one index over the shards of several data sets. The shards are not moved.

    Args:
        source: A list of data sets in order, each as a folder or an index file; or a folder, of which all
            data sets below it are merged in the order of their names.
        out: The folder of the new index: a path, a URI, or both as `(local, remote)`; by default `source`,
            if it is a folder. Shards are named relative to it. A data set that is not below it has to be
            moved there, under the last component of its name.
        keep_local: If `out` is both, also write the index to the local side.
        download_timeout: Seconds for all attempts of one request together.

    Raises:
        ConfigError: There is nothing to merge, two shards would have the same name, or the name of a folder
            is not allowed in an index, such as one that starts with a dot.
        IndexNotFoundError: A data set of the list does not exist.
        IndexCorruptError: An index is not valid.
        StoreError: The object store failed.

    Example:
        >>> merge_index(["data/part-0", "data/part-1"], "data")
        >>> merge_index("data")  # the same
    """
    if isinstance(source, list):
        if out is None:
            raise ConfigError("`out` is not given: expected the folder of the new index")
        folders = [Store(_main_side(item), deadline_s=download_timeout) for item in source]
    else:
        out = source if out is None else out
        root = Store(_main_side(source), deadline_s=download_timeout)
        folders = [Store(f"{root.uri}/{key}", deadline_s=download_timeout) for key in _find(root, "")]
    if not folders:
        raise ConfigError(f"there is no data set in `{source}`: expected at least one to merge")
    output = DatasetOutput(out, keep_local=keep_local)
    shards = [shard for folder in folders for shard in _read_shards(folder, output.uri)]
    names = Counter(_main_file(shard)["basename"] for shard in shards)
    name, count = names.most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ConfigError(
            f"{count} shards would be `{name}` below `{output.uri}`: expected data sets in folders of "
            "different names"
        )
    output.publish(shards)


def _main_side(place: Place) -> str:
    local, remote = split_place(place)
    uri = str(local) if remote is None else remote
    return uri.rstrip("/").removesuffix(f"/{INDEX_NAME}")


def _find(root: Store, prefix: str) -> Iterator[str]:
    """Yield the folders of data sets below `root`, in order. Folders inside a data set are not searched."""
    for key in root.list_dirs(prefix)[0]:
        if any(meta.key == f"{key}/{INDEX_NAME}" for meta in root.list_dirs(key)[1]):
            yield key
        else:
            yield from _find(root, key)


def _read_shards(folder: Store, target: str) -> list[dict[str, Any]]:
    """Return the shards of a data set with names relative to `target`."""
    try:
        data = folder.get(INDEX_NAME)
    except StoreNotFoundError:
        raise IndexNotFoundError(
            f"there is no index at `{folder.uri}`: expected a data set to merge"
        ) from None
    _native.ShardIndex.parse(data, f"{folder.uri}/{INDEX_NAME}")
    uri, root = folder.uri, Store(target).uri
    relative_path = uri.removeprefix(f"{root}/") if uri.startswith(f"{root}/") else uri.rpartition("/")[2]
    if uri == root:
        raise ConfigError(f"`{uri}` would be merged into itself: expected data sets in folders below `out`")
    shards = move_files(json.loads(data)["shards"], relative_path)
    try:
        _native.ShardIndex.parse(
            json.dumps({"shards": shards, "version": 2}).encode(), f"{root}/{INDEX_NAME}"
        )
    except IndexCorruptError as error:
        raise ConfigError(
            f"`{uri}` cannot be merged under its name, because readers would reject the index: {error}; "
            "rename the folder"
        ) from None
    return shards


def _main_file(shard: dict[str, Any]) -> dict[str, Any]:
    file: dict[str, Any] = shard["raw_data"]
    return file
