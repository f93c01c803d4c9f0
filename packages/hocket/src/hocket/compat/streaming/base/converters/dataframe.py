"""Conversion of Spark DataFrames: one data set per partition, and one index over all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hocket.stream.convert.sample_writer import check_output, write_converted
from hocket.stream.errors import ConfigError
from hocket.stream.spark import collect_parts, part_text, partition_number, select_columns, write_parts
from hocket.stream.write.output import Place
from hocket.stream.write.write_job import PartWriter, WriteJob

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

    Spark's tasks write the folders in parallel. Samples are in the order of the partitions. A task that is
    retried leaves nothing, and a job that fails or is killed leaves no index, as with
    `hocket.stream.spark.write_mds`, whose job this is with mosaicml-streaming's names and types. Needs Hocket
    and pyarrow on the machines that run the tasks.

    Args:
        dataframe: The `pyspark.sql.DataFrame` to write.
        merge_index: Write one index over all partitions; otherwise one for each.
        mds_kwargs: Arguments of `MDSWriter`, `out` among them. The defaults are zstd compression and the
            columns of the DataFrame's schema, in which bytes and shorts become `uint8` and `uint16`, as in
            mosaicml-streaming. These types hold no negative values: give `columns` if there are any.
        udf_iterable: Makes samples from a pandas DataFrame; called for each Arrow batch of rows. Requires
            `columns`, and pandas on the machines that run the tasks.
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
    columns = settings.pop("columns")
    job = WriteJob(out, {"hashes": None, **settings})
    check_output(out, columns, job.settings | {"exist_ok": job.exist_ok})
    job.check()
    with job.running():
        if udf_iterable is None:
            parts = write_parts(select_columns(dataframe, columns), job, columns)
        else:
            make = functools.partial(udf_iterable, **(udf_kwargs or {}))
            write = functools.partial(_write_frames, job=job, columns=columns, make=make)
            parts = collect_parts(dataframe.mapInPandas(write, "part string"))
        job.commit(parts, one_index=merge_index)
    return out, 0


#: The name in older scripts.
dataframeToMDS = dataframe_to_mds  # noqa: N816


def _write_frames(
    frames: Iterable[Any], *, job: WriteJob, columns: Mapping[str, str], make: MakeSamples
) -> Iterator[Any]:
    """Write the samples made from a partition's DataFrames in a Spark task; yield its part as text."""
    import pandas as pd  # type: ignore[import-untyped]

    samples = (sample for frame in frames for sample in make(frame))
    first = next(samples, None)
    if first is None:
        return
    number = partition_number()
    with PartWriter(job, number, columns) as writer:
        write_converted(itertools.chain([first], samples), columns, writer, source=f"part {number}")
    yield pd.DataFrame({"part": [part_text(writer.part)]})


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
