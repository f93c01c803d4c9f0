"""Conversion of Spark DataFrames: one data set per partition, and one index over all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hocket.compat.streaming.writers import MDSWriter
from hocket.native import Store
from hocket.stream import merge_index as _merge_index
from hocket.stream.errors import ConfigError, DatasetExistsError
from hocket.stream.write.output import Place, split_place

#: A function that makes samples from rows, given as a pandas DataFrame.
MakeSamples = Callable[..., Iterable[Mapping[str, Any]]]

_ENCODINGS = {
    "BinaryType": "bytes",
    "ByteType": "uint8",
    "DecimalType": "str_decimal",
    "DoubleType": "float64",
    "FloatType": "float32",
    "IntegerType": "int32",
    "LongType": "int64",
    "ShortType": "uint16",
    "StringType": "str",
}
_ELEMENTS = {
    "DoubleType": "float64",
    "FloatType": "float32",
    "IntegerType": "int32",
    "LongType": "int64",
    "ShortType": "int16",
}


def dataframe_to_mds(
    dataframe: Any,
    merge_index: bool = True,
    mds_kwargs: Mapping[str, Any] | None = None,
    udf_iterable: MakeSamples | None = None,
    udf_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Place, int]:
    """Write a Spark DataFrame as MDS shards, with one folder per partition.

    Spark's tasks write the folders in parallel. Spark may retry a task, and each attempt begins its folder
    anew. Samples are in the order of the partitions. Needs pyspark without Spark Connect, and Hocket on the
    machines that run the tasks.

    Args:
        dataframe: The `pyspark.sql.DataFrame` to write.
        merge_index: Write one index over all partitions at the end.
        mds_kwargs: Arguments of `MDSWriter`, `out` among them. The defaults are zstd compression and the
            columns of the DataFrame's schema, in which bytes and shorts become `uint8` and `uint16`, as in
            mosaicml-streaming. These types hold no negative values: give `columns` if there are any.
        udf_iterable: Makes samples from a pandas DataFrame; called for each Arrow batch of rows. Requires
            `columns`, and pandas and pyarrow on the machines that run the tasks.
        udf_kwargs: Further arguments of `udf_iterable`.

    Returns:
        `out`, and the number of failures, which is always 0: a failure is raised.

    Raises:
        ConfigError: `out` or `columns` are missing, or a column has a type without an encoding.
        DatasetExistsError: There is a data set at `out`, and `exist_ok` is not among `mds_kwargs`.
    """
    settings = {"compression": "zstd"} | dict(mds_kwargs or {})
    if "out" not in settings:
        raise ConfigError("`mds_kwargs` has no `out`: expected where the data set is to be written")
    if udf_iterable is not None and "columns" not in settings:
        raise ConfigError("`mds_kwargs` has no `columns`: expected those of the samples of `udf_iterable`")
    if "columns" not in settings:
        fields = dataframe.schema.fields
        settings["columns"] = {field.name: _encoding(field.name, field.dataType) for field in fields}
    out: Place = settings.pop("out")
    _refuse_taken(out, exist_ok=settings.pop("exist_ok", False))
    if udf_iterable is None:
        write = functools.partial(_write_partition, out=out, settings=settings)
        parts = dataframe.rdd.mapPartitionsWithIndex(write).collect()
    else:
        make = functools.partial(udf_iterable, **(udf_kwargs or {}))
        write_frames = functools.partial(_write_frames, out=out, settings=settings, make=make)
        parts = [row.part for row in dataframe.mapInPandas(write_frames, "part string").collect()]
    if merge_index:
        _merge_index([_below(out, part) for part in parts], out, keep_local=settings.get("keep_local", False))
    return out, 0


#: The name in older scripts.
dataframeToMDS = dataframe_to_mds  # noqa: N816


def _write_partition(
    number: int, rows: Iterable[Any], *, out: Place, settings: Mapping[str, Any]
) -> Iterator[str]:
    """Write the rows of a partition in a Spark task; yield the name of its folder."""
    arrays = {
        column: encoding.split(":")[1]
        for column, encoding in settings["columns"].items()
        if encoding.startswith("ndarray:")
    }
    samples = (
        {
            column: np.asarray(value, arrays[column]) if column in arrays else value
            for column, value in row.asDict().items()
        }
        for row in rows
    )
    yield _write_samples(number, samples, out=out, settings=settings)


def _write_frames(
    frames: Iterable[Any], *, out: Place, settings: Mapping[str, Any], make: MakeSamples
) -> Iterator[Any]:
    """Write the samples made from a partition's DataFrames in a Spark task; yield the name of its folder."""
    import pandas as pd  # type: ignore[import-untyped]
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    samples = (sample for frame in frames for sample in make(frame))
    name = _write_samples(task.partitionId(), samples, out=out, settings=settings)
    yield pd.DataFrame({"part": [name]})


def _write_samples(
    number: int, samples: Iterable[Mapping[str, Any]], *, out: Place, settings: Mapping[str, Any]
) -> str:
    name = f"{number:05}"
    with MDSWriter(out=_below(out, name), exist_ok=True, **settings) as writer:
        for sample in samples:
            writer.write(sample)
    return name


def _below(out: Place, name: str) -> Any:
    local, remote = split_place(out)
    sides = [f"{side}/{name}" for side in (local, remote) if side is not None]
    return sides[0] if len(sides) == 1 else tuple(sides)


def _refuse_taken(out: Place, *, exist_ok: bool) -> None:
    local, remote = split_place(out)
    place = str(local) if remote is None else remote
    if not exist_ok and Store(place).list_dirs() != ([], []):
        raise DatasetExistsError(
            f"`{place}` is not empty: choose another place, or give `exist_ok=True` to replace what is there"
        )


def _encoding(column: str, kind: Any) -> str:
    encoding = _ENCODINGS.get(type(kind).__name__)
    element = getattr(kind, "elementType", None)
    if type(element).__name__ in _ELEMENTS:
        return f"ndarray:{_ELEMENTS[type(element).__name__]}"
    if encoding is None:
        raise ConfigError(
            f"column `{column}` is of type {kind.simpleString()}: expected numbers, arrays of them, strings, "
            "binary, or decimals; give `columns`, and with `udf_iterable` what makes samples of the rows"
        )
    return encoding
