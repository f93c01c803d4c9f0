"""The index of a folder of Parquet files: each row group is a shard."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.stream.convert.sources import SourceFiles, partition_values
from hocket.stream.encodings import resolve_encoding
from hocket.stream.errors import ConfigError
from hocket.stream.read.location import DatasetLocation
from hocket.stream.read.parquet.columns import choose_columns
from hocket.stream.read.parquet.files import SUFFIX, ParquetFile, read_files
from hocket.stream.settings.defaults import SIZE_LIMIT
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
    columns: Sequence[str] | None,
    encodings: Mapping[str, str],
    deadline_s: float,
    split: str | None = None,
) -> ParquetIndex:
    """Return the index of the Parquet files at a location.

    Args:
        location: The folder, and its cache folder.
        columns: Names of the columns to read; None for all.
        encodings: Encodings by column name, instead of the usual ones.
        deadline_s: Seconds for all attempts of one request together.
        split: Name of the split to read, by the files' names.

    Raises:
        ConfigError: There is no such file or split, the files' columns differ, or no encoding holds a column.
        ShardCorruptError: A file is not Parquet.
        StoreError: The object store failed.
    """
    files = read_files(location, deadline_s=deadline_s, split=split)
    if not files:
        raise ConfigError(
            f"there is no file in `{location.origin}` that ends with {SUFFIX}: expected one; hidden files "
            "and folders are not read"
        )
    paths = {Path("/") / file.key: file for file in files}
    partitions = partition_values(Path("/"), list(paths), encodings)
    kinds = SourceFiles(root=Path("/"), files=list(paths), partitions=partitions).partition_columns()
    chosen = choose_columns(files, kinds, wanted=columns, given=encodings)
    shards = [
        shard for path, file in paths.items() for shard in _shards(file, chosen, partitions.get(path, {}))
    ]
    document = json.dumps({"version": 2, "shards": shards}, separators=(",", ":")).encode()
    return ParquetIndex(document=document, notice=_notice(location.origin, shards))


def _shards(file: ParquetFile, columns: Mapping[str, str], partition: Mapping[str, Any]) -> list[Any]:
    summary = file.summary
    leaves = {
        column["name"]: range(*column["leaves"]) for column in summary["columns"] if column["name"] in columns
    }
    constants = [(name, json.dumps(partition.get(name))) for name in columns if name not in leaves]
    widths = [resolve_encoding(kind, allow_unsafe_types=True).width for kind in columns.values()]
    identity = [file.key, file.size, file.etag, summary["digest"], list(columns.items()), constants]
    mark = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    shards = []
    for number, group in enumerate(summary["row_groups"]):
        chunks = sorted(tuple(group["leaves"][leaf]) for own in leaves.values() for leaf in own)
        decoded = 0
        for name, width in zip(columns, widths, strict=True):
            stored = sum(group["leaves"][leaf][2] for leaf in leaves.get(name, ()))
            decoded += stored + 4 * group["rows"] if width is None else width * group["rows"]
        shards.append(
            {
                "version": 2,
                "format": "parquet",
                "column_names": list(columns),
                "column_encodings": list(columns.values()),
                "column_sizes": widths,
                "compression": None,
                "samples": group["rows"],
                "raw_data": {
                    "basename": f"{file.key}.{mark}.{number:05}.mds",
                    "bytes": 8 + 4 * group["rows"] + decoded,
                    "hashes": {"parquet_footer": summary["digest"]},
                },
                "zip_data": None,
                "row_group": {
                    "file": file.key,
                    "file_bytes": file.size,
                    "footer_bytes": summary["footer_bytes"],
                    "row_group": number,
                    "ranges": _merge(chunks),
                    "etag": summary["etag"],
                    "constants": constants,
                },
            }
        )
    return shards


def _merge(chunks: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """Return the start and the length of the ranges that hold chunks, which are in order."""
    ranges: list[tuple[int, int]] = []
    for start, length, *_ in chunks:
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
        else:
            ranges.append((start, length))
    return ranges


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
