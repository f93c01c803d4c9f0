"""The entries of an index for the row groups of Parquet files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import resolve_encoding
from hocket.stream.read.parquet.files import ParquetFile


def list_shards(
    file: ParquetFile,
    columns: Mapping[str, str],
    partition: Mapping[str, Any],
    kept: NDArray[np.bool_] | None = None,
) -> list[dict[str, Any]]:
    """Return the entries of a file's row groups.

    Args:
        file: The file.
        columns: Encoding of each column to read. Those that the file lacks are null.
        partition: Values of columns that the names of its folders hold.
        kept: Whether each row is read; None for all. Row groups of which none is are left out.
    """
    summary = file.summary
    leaves = {
        column["name"]: range(*column["leaves"]) for column in summary["columns"] if column["name"] in columns
    }
    constants = [(name, json.dumps(partition.get(name))) for name in columns if name not in leaves]
    widths = _widths(tuple(columns.values()))
    identity = [file.key, file.size, file.etag, summary["digest"], list(columns.items()), constants]
    shards, start = [], 0
    for number, group in enumerate(summary["row_groups"]):
        count = group["rows"]
        rows, start = None if kept is None else kept[start : start + count], start + count
        num_read, digits = count, None
        if rows is not None and not rows.all():
            num_read, digits = int(rows.sum()), np.packbits(rows).tobytes().hex()
        if kept is not None and not num_read:
            continue
        mark = _digest(identity if digits is None else [*identity, digits])
        chunks = sorted(tuple(group["leaves"][leaf]) for own in leaves.values() for leaf in own)
        decoded = 0
        for name, width in zip(columns, widths, strict=True):
            stored = (
                sum(group["leaves"][leaf][2] for leaf in leaves.get(name, ())) * num_read // max(count, 1)
            )
            decoded += stored + 4 * num_read if width is None else width * num_read
        hashes = {"parquet_footer": summary["digest"]}
        shards.append(
            {
                "version": 2,
                "format": "parquet",
                "column_names": list(columns),
                "column_encodings": list(columns.values()),
                "column_sizes": list(widths),
                "compression": None,
                "samples": num_read,
                "raw_data": {
                    "basename": f"{file.key}.{mark}.{number:05}.mds",
                    "bytes": 8 + 4 * num_read + decoded,
                    "hashes": hashes if digits is None else hashes | {"parquet_rows": _digest(digits)},
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
                    "rows": digits,
                },
            }
        )
    return shards


@functools.cache
def _widths(kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the bytes per value of encodings; None where they differ."""
    return tuple(resolve_encoding(kind, allow_unsafe_types=True).width for kind in kinds)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _merge(chunks: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """Return the start and the length of the ranges that hold chunks, which are in order."""
    ranges: list[tuple[int, int]] = []
    for start, length, *_ in chunks:
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
        else:
            ranges.append((start, length))
    return ranges
