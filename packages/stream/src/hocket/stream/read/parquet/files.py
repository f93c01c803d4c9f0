"""The files of a folder of Parquet, and the summaries of their footers, kept in the cache folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.native import Store, _native
from hocket.native.errors import StoreError, StorePermissionError, StoreTransientError
from hocket.stream.convert.sources import split_name
from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.layout import HubLayout
from hocket.stream.read.location import DatasetLocation

logger = logging.getLogger("hocket.stream")

SUFFIX = ".parquet"
#: The file in the cache folder that keeps the summaries.
KEPT_NAME = "parquet.json"
_KEPT_VERSION = 2
#: What files with the same columns have in common in their summaries.
_SHARED = ("columns", "metadata")
#: The name of one of several files of a split, as on a hub.
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}.*")
#: Folders that are listed to find out whether there are Parquet files.
_MOST_FOLDERS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A file, and what its footer says."""

    key: str
    """Path within the data set."""

    size: int

    etag: str | None
    """Its entity tag, or the time of its last change, if the store has none."""

    summary: dict[str, Any]
    """Columns and row groups; see `_native.parquet_footers`. Files with equal columns share them."""


def read_files(
    location: DatasetLocation,
    *,
    deadline_s: float,
    split: str | None = None,
    choose: Callable[[Sequence[str]], Collection[str]] | None = None,
    layout: HubLayout | None = None,
) -> list[ParquetFile]:
    """Return the Parquet files of a data set, by name, with the summaries of their footers.

    A footer is read only if the summary of the same file, by its size and entity tag, is not kept in the
    cache folder. If the store is out of reach, the files are those that are kept.

    Args:
        location: The folder, and its cache folder.
        deadline_s: Seconds for all attempts of one request together.
        split: Name of the split to read, by the files' names.
        choose: Returns which of the split's files are read, from their names; the footers of others are not.
        layout: The choice of the files of a split on a hub, instead of `split`.

    Raises:
        ConfigError: Files belong to several splits, and none is chosen; or the chosen one is not there.
        ShardCorruptError: A file is not Parquet.
        StoreError: The object store failed.
    """
    kept, names = _load(location)

    def select(keys: list[str]) -> list[str]:
        # The names of a hub's files are those that its layout has chosen already.
        of_split = sorted(keys if layout else choose_split(location.origin, keys, split))
        return of_split if choose is None else sorted(choose(of_split))

    try:
        listed = _list(location, deadline_s, layout)
    except (StorePermissionError, StoreTransientError) as error:
        chosen = select(names) if names else []
        if not names or not kept.keys() >= set(chosen):
            raise
        logger.warning("%s; the footers kept in `%s` are used", str(error), location.local)
        return [kept[key] for key in chosen]
    chosen = select([key for key, *_ in listed])
    found = {
        key: kept[key]
        for key, size, etag in listed
        if key in kept and (kept[key].size, kept[key].etag) == (size, etag)
    }
    wanted = set(chosen) - found.keys()
    missing = [file for file in listed if file[0] in wanted]
    footers = _native.parquet_footers(
        location.origin, [(key, size) for key, size, _ in missing], deadline_s=deadline_s
    )
    schemas: dict[str, dict[str, Any]] = {}
    for (key, size, etag), text in zip(missing, footers, strict=True):
        summary = _share(json.loads(text), schemas)
        found[key] = ParquetFile(key=key, size=size, etag=etag, summary=summary)
    now = [key for key, *_ in listed]
    if location.remote is not None and (missing or names != now):
        _keep(location, now, [found[key] for key in now if key in found])
    return [found[key] for key in chosen]


def has_parquet(location: DatasetLocation, *, deadline_s: float) -> bool:
    """Return whether a folder has Parquet files, and can be listed; looks into its first subfolders only."""
    store, folders = Store(location.origin, deadline_s=deadline_s), [""]
    try:
        for _ in range(_MOST_FOLDERS):
            dirs, files = store.list_dirs(folders.pop(0))
            if any(file.key.lower().endswith(SUFFIX) for file in files):
                return True
            folders += [name for name in dirs if not _is_hidden(name.rstrip("/").rpartition("/")[2])]
            if not folders:
                break
    except StoreError:  # plain HTTP, or no permission: the caller reports the missing index
        pass
    return False


def has_kept(location: DatasetLocation) -> bool:
    """Return whether the cache folder keeps footers of Parquet files of this data set."""
    return bool(_load(location)[1])


def is_split(name: str) -> bool:
    """Return whether names of files may tell this split; `all` stands for all."""
    return name == "all" or split_name((name,)) is not None


def choose_split(origin: str, keys: list[str], split: str | None) -> set[str]:
    """Return the files of a split by their names, as `convert` does.

    A name such as `train_sft` is that of files such as `train_sft-00000-of-00002.parquet` only.

    Args:
        origin: The data set.
        keys: Paths of the files within it.
        split: Name of the split; None if the files may be of one only, `all` for all.

    Raises:
        ConfigError: There are several and none is chosen, or there is no such split.
    """
    by_split: dict[str | None, list[str]] = {}
    for key in keys:
        by_split.setdefault(split_name(tuple(key.split("/"))), []).append(key)
    names = sorted(name for name in by_split if name is not None)
    if split is not None and split != "all":
        parts = {key: _PART.fullmatch(key.rpartition("/")[2]) for key in keys}
        if named := {key for key, part in parts.items() if part and part[1] == split}:
            return named
        wanted = split_name((split,)) if split.isalpha() else None
        if wanted not in names:
            raise ConfigError(
                f"`split` is `{split}`: expected a folder of `{origin}`, or a split by the names of its "
                f"Parquet files, {names}, or `all`"
            )
        return set(by_split[wanted])
    if split is None and len(names) > 1:
        examples = ", ".join(f"`{by_split[name][0]}`" for name in names)
        raise ConfigError(
            f"`{origin}` has Parquet files of the splits {names}, by their names ({examples}): "
            f"expected one split, so that they are not merged; give `split`, as `{names[-1]}`, or `all`"
        )
    return set(keys)


def _list(
    location: DatasetLocation, deadline_s: float, layout: HubLayout | None
) -> list[tuple[str, int, str | None]]:
    """Return name, size and entity tag of each file, by name, without hidden files and folders.

    With a layout, the files are those that it chooses.
    """
    store = Store(location.origin, deadline_s=deadline_s)
    listed = store.list()
    if layout is not None:
        chosen = layout.choose(location.origin, [meta.key for meta in listed], store.get)
        listed = [meta for meta in listed if meta.key in chosen]
    else:
        listed = [meta for meta in listed if _is_data(meta.key)]
    return [(meta.key, meta.size, meta.etag or str(meta.modified_ms)) for meta in listed]


def _is_data(key: str) -> bool:
    return key.lower().endswith(SUFFIX) and not any(_is_hidden(part) for part in key.split("/"))


def _is_hidden(part: str) -> bool:
    return part.startswith((".", "__")) or part == "_temporary"


def _load(location: DatasetLocation) -> tuple[dict[str, ParquetFile], list[str]]:
    """Return the kept files by name, and the names of all files when they were listed.

    There are none if they are those of another data set, or cannot be read.
    """
    if location.remote is None:
        return {}, []
    try:
        kept = json.loads((location.local / KEPT_NAME).read_bytes())
        if (kept["version"], kept["origin"]) != (_KEPT_VERSION, location.remote):
            return {}, []
        schemas = kept["schemas"]
        files = {
            key: ParquetFile(key=key, size=size, etag=etag, summary={**schemas[number], **rest})
            for key, size, etag, number, rest in kept["files"]
        }
        return files, list(kept["listed"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}, []


def _share(summary: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make a summary share the columns of an equal one, since thousands of files mostly have the same.

    Args:
        summary: The summary, which is changed.
        schemas: The different columns so far, with what else is shared, by their text; new ones are added.
    """
    own = {name: summary[name] for name in _SHARED}
    summary |= schemas.setdefault(json.dumps(own), own)
    return summary


def _keep(location: DatasetLocation, listed: list[str], files: list[ParquetFile]) -> None:
    """Write the summaries to the cache folder. Without room or permission, they are read again next time."""
    schemas: dict[str, dict[str, Any]] = {}
    for file in files:
        _share(file.summary, schemas)
    numbers = {id(one["columns"]): number for number, one in enumerate(schemas.values())}
    rows = []
    for file in files:
        rest = {name: value for name, value in file.summary.items() if name not in _SHARED}
        rows.append([file.key, file.size, file.etag, numbers[id(file.summary["columns"])], rest])
    document = {
        "version": _KEPT_VERSION,
        "origin": location.remote,
        "listed": listed,
        "schemas": list(schemas.values()),
        "files": rows,
    }
    keep(location, KEPT_NAME, json.dumps(document, separators=(",", ":")).encode())


def keep(location: DatasetLocation, name: str, data: bytes) -> None:
    """Write a file of the cache folder, if there is room and permission."""
    with contextlib.suppress(OSError):
        location.local.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=f".{name}.", dir=location.local)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(unfinished).replace(location.local / name)
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            raise
