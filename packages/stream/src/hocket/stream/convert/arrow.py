"""Conversion of Parquet and Arrow files, and of folders saved by `datasets`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert.arrow_columns import infer_columns
from hocket.stream.convert.arrow_values import batch_samples
from hocket.stream.convert.sample_writer import (
    ConvertReport,
    check_output,
    choose_columns,
    require,
    write_samples,
)
from hocket.stream.convert.sources import SourceFiles, check_present, find_files, source_path, walk
from hocket.stream.errors import ConfigError
from hocket.stream.write.output import Place

PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather")

_ROWS = 1024
#: A function that returns the record batches of a source with their files, from the first one in each call.
_Batches = Callable[[], Iterator[tuple[Path, Any]]]


def from_parquet(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert Parquet files to a data set.

    Numbers keep their type. Lists of numbers, and tensors, become `ndarray`, with a shape if it is fixed;
    strings and UUIDs `str`, binary `bytes`, decimals `str_decimal`, times `str` in ISO 8601 with all digits.
    Files that `datasets` stores (`struct<bytes, path>`) stay unchanged: images become `png` if all of a
    column are, else `jpeg`, which decodes all formats of Pillow; lists of images `list[png]` or `list[jpeg]`;
    other files `bytes`. Booleans, structs, maps, other lists, and columns with nulls become `json`, in which
    times, UUIDs and decimals are text, and binary is in Base64. Extension types become what their storage
    does. All files have the same columns, of the same types; one without any value in a file may be of type
    null there.

    A warning names a column that becomes `json` only because of nulls, a column of arrays with empty lists,
    binary in `json`, and files whose names are left out.

    Folders named `date=2020-01-01` become columns, `int` if all values are integers without leading zeros.

    Args:
        source: A file, or a folder: its `.parquet` files, by name, also behind links to folders, without
            hidden ones.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones.
        split: The split to read if the folder has files of several: `train`, `validation` or `test`; `all` to
            merge them.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SourceNotFoundError: The source does not exist.
        ConfigError: `pyarrow` is not installed, a file cannot be read, there are no samples, files belong to
            several splits, or a column has a type, or nulls, that no encoding holds.
        SampleError: A value does not fit a given encoding.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    parquet = require("pyarrow.parquet", "pyarrow")
    check_output(out, columns, settings)
    found = find_files(source, PARQUET_SUFFIXES, split=split, columns=columns)

    def batches() -> Iterator[tuple[Path, Any]]:
        for path in found.files:
            with _readable(path), parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS):
                    yield path, batch

    return _write(batches, found, out, columns, settings)


def from_arrow(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert Arrow files of the file or the stream format to a data set.

    Arguments, types and errors are those of `from_parquet`. Files in a folder end with `.arrow` or
    `.feather`.
    """
    arrow = require("pyarrow", "pyarrow")
    check_output(out, columns, settings)
    found = find_files(source, ARROW_SUFFIXES, split=split, columns=columns)

    def batches() -> Iterator[tuple[Path, Any]]:
        for path in found.files:
            with _readable(path), arrow.memory_map(str(path)) as data:
                if data.read(6) == b"ARROW1":
                    file = arrow.ipc.open_file(data)
                    yield from ((path, file.get_batch(number)) for number in range(file.num_record_batches))
                else:
                    data.seek(0)
                    yield from ((path, batch) for batch in arrow.ipc.open_stream(data))

    return _write(batches, found, out, columns, settings)


def from_hugging_face(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a folder of `datasets.Dataset.save_to_disk` to a data set.

    Arguments, types and errors are those of `from_parquet`. `Array2D` to `Array5D` become `ndarray`, with
    their shape if it is fixed.

    Raises:
        ConfigError: `datasets` is not installed, or the folder has several splits, and `split` names none of
            them.
    """
    datasets = require("datasets", "datasets")
    require("pyarrow", "pyarrow")
    check_output(out, columns, settings)
    path = source_path(source)
    for file in walk(path):
        check_present(file)
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` is not a folder of `save_to_disk`: {error}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise ConfigError(
                f"`{path}` has the splits {sorted(dataset)}: expected one, such as `{path}/{min(dataset)}`, "
                f"or its name as `split`, which is {split!r}"
            )
        dataset = dataset[split]

    def batches() -> Iterator[tuple[Path, Any]]:
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
            yield from ((path, batch) for batch in table.to_batches())

    return _write(batches, SourceFiles(root=path, files=[]), out, columns, settings)


def _write(
    batches: _Batches,
    source: SourceFiles,
    out: Place,
    columns: Mapping[str, str] | None,
    settings: Mapping[str, Any],
) -> ConvertReport:
    inferred = infer_columns(batches(), given=set(columns or {}))
    kinds = choose_columns({**source.partition_columns(), **inferred} if inferred else {}, columns)
    return write_samples(_samples(batches(), source, kinds), kinds, out, settings)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert Arrow's errors to one that names the file."""
    try:
        yield
    except (require("pyarrow", "pyarrow").ArrowException, OSError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from None


def _samples(
    batches: Iterator[tuple[Path, Any]], source: SourceFiles, kinds: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for path, batch in batches:
        for sample in batch_samples(batch, kinds):
            yield source.add_partition(sample, path)
