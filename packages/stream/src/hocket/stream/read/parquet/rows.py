"""The rows of Parquet files that a filter keeps, from the columns that it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError
from hocket.stream.read.columns import ColumnSet
from hocket.stream.read.location import DatasetLocation
from hocket.stream.read.parquet.columns import choose_columns
from hocket.stream.read.parquet.files import ParquetFile, keep
from hocket.stream.read.parquet.folders import FolderValues
from hocket.stream.read.parquet.shards import list_shards
from hocket.stream.read.parquet.unify import columns_of, with_different_columns
from hocket.stream.settings.defaults import DOWNLOAD_RETRY, PREFETCH_BATCHES, PREFETCH_BYTES
from hocket.stream.settings.file_format import FileFormat
from hocket.stream.settings.row_filter import RowFilter

#: Encodings whose values are compared. Values of `json` are, if they are numbers, text, booleans or null.
_COMPARED = ("int", "str", "str_decimal", "json", *SCALARS)
#: Row groups that are read at once: each is a small request.
_AT_ONCE = 32
_BATCH_ROWS = 1 << 16
_LIST_ROWS = 1 << 22

Rows = NDArray[np.bool_]


def choose_rows(
    location: DatasetLocation,
    files: Sequence[ParquetFile],
    folders: FolderValues,
    chosen: FileFormat,
    *,
    deadline_s: float,
) -> list[Rows | None]:
    """Return which rows of each file are read; None for all of them.

    The columns that the filter names are read whole. In a cache folder the result is kept, so that they are
    read once for all processes of a machine, and for all runs as long as the files do not change.

    Args:
        location: The folder, and its cache folder.
        files: The files.
        folders: The values that the names of their folders hold.
        chosen: The filter, the encodings that are given, and the policy for files that differ.
        deadline_s: Seconds for all attempts of one request together.

    Raises:
        ConfigError: The filter names an unknown column, or one whose values are not compared.
        ShardCorruptError: A row group cannot be decoded.
        StoreError: The object store failed.
    """
    filters = {file.key: folders.filter_of(file.key) for file in files}
    read = [file for file in files if filters[file.key] is not True]
    if not read or chosen.filters is None:
        return [None] * len(files)
    names = [name for name in chosen.filters.columns if name not in folders.columns]
    different = with_different_columns(read)
    known = dict.fromkeys(column["name"] for file in different for column in file.summary["columns"])
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"`filters` names {unknown}: expected columns of the files or of their folders, "
            f"{[*folders.columns, *known][:20]}"
        )
    if chosen.schema == "equal" and (lacked := [name for name in names if name not in columns_of(read[0])]):
        raise ConfigError(
            f"`filters` names `{lacked[0]}`, which is not in `{read[0].key}`: expected it in all files; give "
            "`schema='union'`, by which it is null there"
        )
    given = {name: kind for name, kind in chosen.encodings.items() if name in names}
    decimals = [name for name in names if _is_decimal(name, different)]
    given |= dict.fromkeys(decimals, "json")  # which has nulls, too
    columns = choose_columns(read, {}, wanted=names, given=given, schema=chosen.schema)
    for name, kind in columns.items():
        if kind not in _COMPARED:
            raise ConfigError(
                f"`filters` names `{name}`, which is read as `{kind}`: expected a column of numbers, text or "
                "booleans"
            )
    parts = [_FilteredFile(file, filters[file.key]) for file in read]
    entries = [entry for part in parts for entry in list_shards(part.file, columns, {})]
    document = json.dumps({"version": 2, "shards": entries}).encode()
    identity = [document, *(f"{part.filter}{part.file.etag}".encode() for part in parts)]
    name = f"rows-{hashlib.blake2b(b'|'.join(identity), digest_size=16).hexdigest()}.bits"
    sizes = [part.num_rows for part in parts]
    mask = _load(location, name, sum(sizes))
    if mask is None:
        mask = _scan(location, document, parts, decimals, deadline_s)
        if location.remote is not None:
            bits = np.packbits(mask).tobytes()
            keep(location, name, hashlib.blake2b(bits, digest_size=16).digest() + bits)
    found = dict(zip((file.key for file in read), np.split(mask, np.cumsum(sizes)[:-1]), strict=True))
    return [found.get(file.key) for file in files]


class _FilteredFile:
    """A file, and the filter on its rows."""

    def __init__(self, file: ParquetFile, row_filter: RowFilter | bool) -> None:
        assert isinstance(row_filter, RowFilter)
        self.file, self.filter = file, row_filter
        self.num_rows = sum(group["rows"] for group in file.summary["row_groups"])


def _load(location: DatasetLocation, name: str, count: int) -> Rows | None:
    """Return the rows that are kept in the cache folder, if they are and are whole."""
    if location.remote is None:
        return None
    try:
        data = (location.local / name).read_bytes()
    except OSError:
        return None
    mark, bits = data[:16], data[16:]
    if len(bits) != -(-count // 8) or hashlib.blake2b(bits, digest_size=16).digest() != mark:
        return None
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)


def _is_decimal(name: str, files: Sequence[ParquetFile]) -> bool:
    """Return whether a column is one of decimals, which JSON holds as text, in all files that have it."""
    columns = [column for file in files if (column := columns_of(file).get(name)) and not column["is_null"]]
    return bool(columns) and all("str_decimal" in column["encodings"] for column in columns)


def _scan(
    location: DatasetLocation,
    document: bytes,
    parts: Sequence[_FilteredFile],
    decimals: Collection[str],
    deadline_s: float,
) -> Rows:
    """Read the columns of conditions, in storage order, and return which rows are kept."""
    index = _native.ShardIndex.parse(document, location.origin)
    cache = _native.ShardCache(
        index,
        location.local,
        location.remote,
        written_ms=0,
        deadline_s=deadline_s,
        keep_zip=False,
        keep_shards=False,
        download_retry=DOWNLOAD_RETRY,
        validate_hash=None,
        limit=None,
    )
    decoder = ColumnSet(index.columns, (), origin=location.origin, allow_unsafe_types=False)
    mask = np.zeros(sum(part.num_rows for part in parts), np.bool_)
    mix = _native.StreamMix([index], [len(mask)])
    for spans in _lists(parts):
        first, last = spans[0][0].start, spans[-1][0].stop
        edges = np.array([first, *(rows.stop for rows, _ in spans)], np.uint64) - np.uint64(first)
        ids = np.arange(first, last, dtype=np.uint64)
        reader = _native.BatchReader(
            [cache],
            mix.listed_order(ids.data, edges.data),
            None,
            rank=0,
            world_size=1,
            first=0,
            stride=1,
            prefetch_bytes=PREFETCH_BYTES,
            prefetch_batches=PREFETCH_BATCHES,
            fetch_threads=_AT_ONCE,
        )
        try:
            for rows, row_filter in spans:
                batch = reader.next()
                assert batch is not None
                values = decoder.decode(batch[3], len(rows))
                for name in decimals:
                    values[name] = [None if text is None else Decimal(text) for text in values[name]]
                mask[rows.start : rows.stop] = row_filter.keeps(values, len(rows))
        finally:
            reader.close()
    return mask


def _lists(parts: Sequence[_FilteredFile]) -> Iterator[list[tuple[range, RowFilter]]]:
    """Yield lists of the batches to read: their rows, counted over all files, and the filter of the file."""
    start, spans = 0, list[tuple[range, RowFilter]]()
    for part in parts:
        end = start + part.num_rows
        for begin in range(start, end, _BATCH_ROWS):
            spans.append((range(begin, min(begin + _BATCH_ROWS, end)), part.filter))
            if spans[-1][0].stop - spans[0][0].start >= _LIST_ROWS:
                yield spans
                spans = []
        start = end
    if spans:
        yield spans
