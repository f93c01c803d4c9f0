"""The index of a folder of Parquet files: each row group is a shard."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.stream.errors import ConfigError
from hocket.stream.read.hub.layout import HubLayout
from hocket.stream.read.location import DatasetLocation
from hocket.stream.read.parquet.columns import choose_columns
from hocket.stream.read.parquet.files import SUFFIX, read_files
from hocket.stream.read.parquet.folders import FolderValues, no_rows
from hocket.stream.read.parquet.rows import choose_rows
from hocket.stream.read.parquet.shards import list_shards
from hocket.stream.settings.defaults import SIZE_LIMIT
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.sizes import parse_bytes

#: Row groups of which half are beyond these sizes are reported.
_SMALL_BYTES = 1 << 20
_LARGE_BYTES = 512 << 20
_FEW_SHARDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetIndex:
    """The index of a data set in Parquet."""

    document: bytes
    """The index in the form of `index.json`."""

    notice: str | None
    """What to tell the user about the sizes of row groups."""


def make_index(
    location: DatasetLocation,
    *,
    chosen: FileFormat,
    deadline_s: float,
    split: str | None = None,
    layout: HubLayout | None = None,
) -> ParquetIndex:
    """Return the index of the Parquet files at a location.

    Args:
        location: The folder, and its cache folder.
        chosen: The columns and rows to read, and the encodings.
        deadline_s: Seconds for all attempts of one request together.
        split: Name of the split to read, by the files' names.
        layout: The choice of the files on a hub, instead of `split`.

    Raises:
        ConfigError: There is no such file or split, the files' columns differ, no encoding holds a column, or
            the filters keep no row.
        ShardCorruptError: A file is not Parquet.
        StoreError: The object store failed.
    """
    folders = FolderValues(location.origin, chosen)
    files = read_files(location, deadline_s=deadline_s, split=split, choose=folders.choose, layout=layout)
    if not files:
        raise ConfigError(
            f"there is no file in `{location.origin}` that ends with {SUFFIX}: expected one; hidden files "
            "and folders are not read"
        )
    # An encoding may be that of a column by which rows are chosen and which is not read.
    compared = () if chosen.filters is None or chosen.columns is None else chosen.filters.columns
    given = {
        name: kind
        for name, kind in chosen.encodings.items()
        if name in (chosen.columns or ()) or name not in compared
    }
    chosen_columns = choose_columns(
        files, folders.columns, wanted=chosen.columns, given=given, schema=chosen.schema
    )
    kept = choose_rows(location, files, folders, chosen, deadline_s=deadline_s)
    shards = [
        shard
        for file, rows in zip(files, kept, strict=True)
        for shard in list_shards(file, chosen_columns, folders.values[file.key], rows)
    ]
    if not shards and chosen.filters is not None:
        raise no_rows(location.origin, chosen.filters)
    document = json.dumps({"version": 2, "shards": shards}, separators=(",", ":")).encode()
    return ParquetIndex(document=document, notice=_notice(location.origin, shards))


def _notice(origin: str, shards: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe row groups that are too large or too small, and what conversion would give."""
    if len(shards) < 2 and not (shards and shards[0]["raw_data"]["bytes"] > _LARGE_BYTES):
        return None
    sizes = [shard["raw_data"]["bytes"] for shard in shards]
    half, limit = int(statistics.median(sizes)), parse_bytes("size_limit", SIZE_LIMIT)
    num_converted = -(-sum(sizes) // limit)
    what = f"the {len(shards)} row groups of `{origin}` have {half / 1e6:.1f} MB when decoded (median)"
    remedy = f"`hocket-stream convert` would write {num_converted} shards of {limit / 1e6:.0f} MB"
    if half > _LARGE_BYTES:
        return (
            f"{what}: each is decoded whole, so the first batch and a change of shards wait for it, and "
            f"samples of fewer row groups are shuffled together; {remedy}"
        )
    if half < _SMALL_BYTES and len(shards) > max(_FEW_SHARDS, 2 * num_converted):
        return f"{what}: each takes a request of its own and is kept as a file in the cache; {remedy}"
    return None
