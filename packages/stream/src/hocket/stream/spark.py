"""Writing of Spark DataFrames as data sets: Spark's tasks write the parts, the driver writes the index."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hocket.stream.convert.arrow_columns import SchemaFacts
from hocket.stream.convert.arrow_parts import look_at, open_job, write_part
from hocket.stream.convert.sample_writer import ConvertReport, choose_columns, require
from hocket.stream.errors import ConfigError
from hocket.stream.write.output import Place
from hocket.stream.write.write_job import WriteJob, WrittenPart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["write_mds"]


def write_mds(
    dataframe: DataFrame,
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> ConvertReport:
    """Write a Spark DataFrame as an MDS data set, one folder for each partition that has rows.

    Columns have the encodings that `hocket.stream.convert.from_parquet` gives to the same rows, and samples
    are in the order of the partitions. A first pass over the rows finds nulls and the formats of images,
    unless `columns` has all columns; cache a DataFrame that is expensive, or that gives other rows each time.

    The index is written last, by the driver. A task that Spark retries or runs twice leaves nothing: only the
    part that Spark takes is in the index, and others are deleted. If the job fails, all parts are deleted; if
    the driver is killed, the parts stay without an index, and a job with `exist_ok=True` deletes them.

    Needs `pip install 'hocket-stream[spark]'` on the driver and on the machines that run the tasks, and the
    same place and credentials on all of them.

    Args:
        dataframe: The DataFrame. `repartition` or `coalesce` it to some hundred megabytes a partition.
        out: A folder that all machines share, the URI of a store, or both as `(local, remote)`.
        columns: Encodings by column name, instead of the inferred ones.
        **settings: Arguments of `MDSWriter`, without `append` and `progress_bar`.

    Returns:
        The number of samples, and the encoding of each column.

    Raises:
        ConfigError: A setting or an encoding is not valid, there are no rows, a column has a type or nulls
            that no encoding holds, or the machines do not share the folder `out`.
        DatasetExistsError: There is a data set at `out`, or another job writes to it, and `exist_ok` is not
            given.
        PythonException: A task failed; Spark's error has the text of the task's, such as a `SampleError`.

    Example:
        >>> write_mds(spark.read.parquet("s3a://bucket/corpus"), "s3://bucket/train", compression="zstd")
    """
    job = open_job(out, columns, settings)
    encodings = choose_columns(_infer(dataframe, set(columns or {})), columns)
    with job.running():
        num_samples = job.commit(write_parts(dataframe, job, encodings))
    return ConvertReport(num_samples=num_samples, columns=encodings)


def write_parts(dataframe: DataFrame, job: WriteJob, columns: Mapping[str, str]) -> list[WrittenPart]:
    """Write each partition of a DataFrame as a part of a job that has been started."""
    write = functools.partial(_write_partition, job=job, columns=dict(columns))
    return collect_parts(_map(dataframe, write, "part string"))


def select_columns(dataframe: DataFrame, names: Iterable[str]) -> DataFrame:
    """Return the columns of a DataFrame with these names, which may have dots."""
    return dataframe.select(*(f"`{name.replace('`', '``')}`" for name in names))


def collect_parts(dataframe: DataFrame) -> list[WrittenPart]:
    """Return the parts that tasks have written as texts of a column `part`."""
    return [WrittenPart(**json.loads(row.part)) for row in dataframe.collect()]


def part_text(part: WrittenPart) -> str:
    """Return a part as text for `collect_parts`."""
    return json.dumps(dataclasses.asdict(part))


def partition_number() -> int:
    """Return the number of the partition of the task that calls this."""
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    return task.partitionId()


def _infer(dataframe: DataFrame, given: set[str]) -> dict[str, str]:
    """Return the encodings of the columns; in a pass over those that are not given."""
    names = list(dataframe.columns)
    if len(set(names)) != len(names):
        raise ConfigError(f"the columns are {names}: expected each name once; rename columns, or drop them")
    rest = [name for name in names if name not in given]
    facts = SchemaFacts()
    if rest:
        for row in _map(select_columns(dataframe, rest), _look_at_partition, "facts binary").collect():
            facts.merge(pickle.loads(row.facts))
    found = facts.encodings(given=())
    if rest and not found:
        return {}
    return {name: found.get(name, "given") for name in names}


def _map(dataframe: DataFrame, function: Callable[[Iterable[Any]], Iterator[Any]], schema: str) -> DataFrame:
    """Apply a function to the record batches of each partition. Spark itself refuses names with dots."""
    names = dataframe.columns
    plain = dataframe.toDF(*(f"column{number}" for number in range(len(names))))
    return plain.mapInArrow(functools.partial(_with_names, names=names, function=function), schema)


def _with_names(
    batches: Iterable[Any], *, names: list[str], function: Callable[[Iterable[Any]], Iterator[Any]]
) -> Iterator[Any]:
    return function(batch.rename_columns(names) for batch in batches)


def _look_at_partition(batches: Iterable[Any]) -> Iterator[Any]:
    arrow = require("pyarrow", "spark")
    facts = look_at(batch for batch in batches if batch.num_rows)
    if facts.types:
        yield arrow.RecordBatch.from_pydict({"facts": [pickle.dumps(facts)]})


def _write_partition(batches: Iterable[Any], *, job: WriteJob, columns: Mapping[str, str]) -> Iterator[Any]:
    """Write the rows of a partition in a task of Spark; yield its part as text."""
    arrow = require("pyarrow", "spark")
    part = write_part(job, partition_number(), batches, columns)
    if part is not None:
        yield arrow.RecordBatch.from_pydict({"part": [part_text(part)]})
