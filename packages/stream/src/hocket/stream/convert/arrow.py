"""Conversion of Parquet and Arrow files, and of folders saved by `datasets`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert.arrow_columns import column_values, infer_columns
from hocket.stream.convert.sample_writer import (
    Converted,
    choose_columns,
    require,
    source_files,
    source_path,
    write_samples,
)
from hocket.stream.errors import ConfigError
from hocket.stream.output import Place

PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather")

_ROWS = 1024
#: A function that returns the record batches of a source, from the first one in each call.
_Batches = Callable[[], Iterator[Any]]


def from_parquet(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Convert Parquet files to a data set.

    Numbers keep their type. Lists of numbers, and tensors, become `ndarray`, with a shape if it is fixed;
    strings `str`, binary `bytes`, decimals `str_decimal`, times `str` in ISO 8601. Booleans, structs, other
    lists, and columns with nulls become `json`. A warning names a column that becomes `json` only because of
    nulls, and a column of arrays with empty lists.

    Args:
        source: A file, or a folder: its `.parquet` files, by name.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SourceNotFoundError: The source does not exist.
        ConfigError: `pyarrow` is not installed, a file cannot be read, there are no samples, or a column
            has a type, or nulls, that no encoding holds.
        SampleError: A value does not fit a given encoding.
        DatasetExistsError: As `MDSWriter`, with its other errors.
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
    """Convert Arrow files of the file or the stream format to a data set.

    Arguments, types and errors are those of `from_parquet`. Files in a folder end with `.arrow` or
    `.feather`.
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
    """Convert a folder of `datasets.Dataset.save_to_disk` to a data set.

    Arguments, types and errors are those of `from_parquet`. `Array2D` to `Array5D` become `ndarray`, with
    their shape if it is fixed. Images stay unchanged files: `png` if all images of a column are, else `jpeg`,
    which decodes all formats of Pillow.

    Raises:
        ConfigError: `datasets` is not installed, or the folder has several splits.
    """
    datasets = require("datasets", "datasets")
    arrow = require("pyarrow", "pyarrow")
    path = source_path(source)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` is not a folder of `save_to_disk`: {error}") from None
    if isinstance(dataset, datasets.DatasetDict):
        raise ConfigError(
            f"`{path}` has the splits {sorted(dataset)}: expected one, such as `{path}/{min(dataset)}`"
        )
    images = {name for name, feature in dataset.features.items() if isinstance(feature, datasets.Image)}

    def batches() -> Iterator[Any]:
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
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
    kinds = choose_columns(infer_columns(batches(), images=images, given=set(columns or {})), columns)
    return write_samples(_samples(batches()), kinds, out, settings)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert Arrow's errors to one that names the file."""
    try:
        yield
    except (require("pyarrow", "pyarrow").ArrowException, OSError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from None


def _samples(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        names = batch.schema.names
        for values in zip(*(column_values(column) for column in batch.columns), strict=True):
            yield dict(zip(names, values, strict=True))
