"""Arrow's tables: Parquet, Arrow files, and the folders that `datasets` saves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hocket.stream.convert.writing import (
    Converted,
    choose_columns,
    require,
    source_files,
    source_path,
    write_samples,
)
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError
from hocket.stream.output import Place

PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather")

_ROWS = 1024
_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}

#: Record batches of a source, from the beginning at each call.
_Batches = Callable[[], Iterator[Any]]


def from_parquet(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Write Parquet files as a data set.

    Numbers keep their type, lists of numbers become `ndarray` (of a fixed size with their shape), texts
    `str`, bytes `bytes`, decimals `str_decimal`, times `str` in ISO 8601; booleans, structs, other lists, and
    columns that have nulls or empty lists become `json`.

    Args:
        source: A file, or a folder: its `.parquet` files, by name.
        out: Where to write.
        columns: Encodings by name, in place of the inferred ones.
        **settings: Of `MDSWriter`.

    Raises:
        SourceNotFoundError: There is no source.
        ConfigError: `pyarrow` is not installed, a file cannot be read, there are no samples, or a column
            has a type, or nulls, that no encoding holds.
        SampleError: A value does not fit a given encoding.
        DatasetExistsError: And the others of `MDSWriter`.
    """
    parquet = require("pyarrow.parquet", "pyarrow")
    files = source_files(source, PARQUET_SUFFIXES)

    def batches() -> Iterator[Any]:
        for path in files:
            with _readable(path), parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_ROWS)

    return _write(batches, out, columns, settings)


def from_arrow(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Write Arrow files, of the file or the stream format, as a data set.

    Arguments, types and errors are those of `from_parquet`; a folder's files end with `.arrow` or `.feather`.
    """
    arrow = require("pyarrow", "pyarrow")
    files = source_files(source, ARROW_SUFFIXES)

    def batches() -> Iterator[Any]:
        for path in files:
            with _readable(path), arrow.memory_map(str(path)) as data:
                if data.read(6) == b"ARROW1":
                    file = arrow.ipc.open_file(data)
                    yield from (file.get_batch(number) for number in range(file.num_record_batches))
                else:
                    data.seek(0)
                    yield from arrow.ipc.open_stream(data)

    return _write(batches, out, columns, settings)


def from_hugging_face(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Write a folder of `datasets.Dataset.save_to_disk` as a data set.

    Arguments, types and errors are those of `from_parquet`. Images stay the files they are: `png` where all
    of a column are, else `jpeg`, which reads every format that Pillow does.

    Raises:
        ConfigError: `datasets` is not installed, or the folder has several splits.
    """
    datasets = require("datasets", "datasets")
    arrow = require("pyarrow", "pyarrow")
    path = source_path(source)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` is no folder that `save_to_disk` wrote: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        raise ConfigError(
            f"`{path}` has the splits {sorted(found)}: expected one, such as `{path}/{min(found)}`"
        )
    images = {name for name, feature in found.features.items() if isinstance(feature, datasets.Image)}

    def batches() -> Iterator[Any]:
        for table in found.with_format("arrow").iter(batch_size=_ROWS):
            for batch in table.to_batches():
                yield arrow.RecordBatch.from_arrays(
                    [
                        column.field("bytes") if name in images else column
                        for name, column in zip(batch.schema.names, batch.columns, strict=True)
                    ],
                    names=batch.schema.names,
                )

    return _write(batches, out, columns, settings, images=images)


def _write(
    batches: _Batches,
    out: Place,
    columns: Mapping[str, str] | None,
    settings: Mapping[str, Any],
    *,
    images: set[str] | frozenset[str] = frozenset(),
) -> Converted:
    kinds = choose_columns(_infer(batches(), images, set(columns or {})), columns)
    return write_samples(_samples(batches()), kinds, out, settings)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns Arrow's complaints about a file into one that names it."""
    try:
        yield
    except (require("pyarrow", "pyarrow").ArrowException, OSError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from None


def _infer(batches: Iterator[Any], images: set[str] | frozenset[str], given: set[str]) -> dict[str, str]:
    types: dict[str, Any] = {}
    nulls: set[str] = set()
    not_png: set[str] = set()
    for batch in batches:
        found = dict(zip(batch.schema.names, batch.schema.types, strict=True))
        if len(found) != batch.num_columns or (types and found != types):
            raise ConfigError(
                f"the columns are {batch.schema}: expected each name once, the same in all files"
            )
        types = found
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = _flat(column)
            has_nulls = column.null_count or (values is not None and values.null_count)
            # An array without items has no place in an `ndarray` column.
            if has_nulls or (values is not None and 0 in _lengths(column)):
                nulls.add(name)
            if name in images and name not in not_png:
                heads = (value.as_py() for value in column if value.is_valid)
                if not all(head[:4] == b"\x89PNG" for head in heads):
                    not_png.add(name)
    return {
        name: _image(name, not_png, nulls)
        if name in images
        else "given"
        if name in given
        else _encoding(name, kind, name in nulls)
        for name, kind in types.items()
    }


def _image(name: str, not_png: set[str], nulls: set[str]) -> str:
    if name in nulls:
        raise ConfigError(
            f"column `{name}` has images without bytes: expected them in the data, not as paths"
        )
    return "jpeg" if name in not_png else "png"


def _encoding(name: str, kind: Any, has_nulls: bool) -> str:
    types = require("pyarrow", "pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_temporal(kind)
    if types.is_duration(kind) or types.is_map(kind) or types.is_interval(kind):
        raise ConfigError(f"column `{name}` is of type {kind}, which no encoding holds: cast it, or drop it")
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if is_binary or types.is_decimal(kind):
        if has_nulls:
            raise ConfigError(
                f"column `{name}` is of type {kind} and has nulls: expected a value in every row"
            )
        return "bytes" if is_binary else "str_decimal"
    if has_nulls:
        return "json"
    if is_text:
        return "str"
    if (number := _number(kind)) is not None:
        return number
    if _is_list(kind) and (number := _number(kind.value_type)) is not None:
        shape = f":{kind.list_size}" if types.is_fixed_size_list(kind) and kind.list_size else ""
        return f"ndarray:{number}{shape}"
    return "json"


def _number(kind: Any) -> str | None:
    name = _ARROW_NAMES.get(str(kind), str(kind))
    return name if name in SCALARS else None


def _is_list(kind: Any) -> bool:
    types = require("pyarrow", "pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _flat(column: Any) -> Any:
    """The numbers of a list column, all in one array; None of another."""
    if _is_list(column.type) and _number(column.type.value_type) is not None:
        return column.flatten()
    return None


def _lengths(column: Any) -> list[int]:
    """Items of each list; null has none."""
    lengths = require("pyarrow.compute", "pyarrow").list_value_length(column)
    return [length or 0 for length in lengths.to_pylist()]


def _samples(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        names = batch.schema.names
        for values in zip(*(_values(column) for column in batch.columns), strict=True):
            yield dict(zip(names, values, strict=True))


def _values(column: Any) -> list[Any]:
    """A column's values; lists of numbers as arrays, times as texts."""
    types = require("pyarrow", "pyarrow").types
    numbers = _flat(column)
    if numbers is not None and not column.null_count and not numbers.null_count:
        items = numbers.to_numpy(zero_copy_only=False)
        ends = np.cumsum(_lengths(column)).tolist()
        return [items[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    values: list[Any] = column.to_pylist()
    if types.is_temporal(column.type) and not types.is_duration(column.type):
        return [None if value is None else value.isoformat() for value in values]
    return values
