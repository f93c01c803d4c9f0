"""Writing of Ray Datasets as data sets: Ray's tasks write the parts, the driver writes the index."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hocket.stream.convert.arrow_columns import SchemaFacts
from hocket.stream.convert.arrow_parts import look_at, open_job, write_part
from hocket.stream.convert.sample_writer import ConvertReport, choose_columns, require
from hocket.stream.errors import ConfigError
from hocket.stream.write.output import Place
from hocket.stream.write.write_job import WrittenPart

try:
    _Datasink: Any = importlib.import_module("ray.data").Datasink
except ImportError:
    _Datasink = None

__all__ = ["MDSSink", "infer_columns", "write_mds"]


class MDSSink(_Datasink or object):  # type: ignore[misc]
    """A sink that writes a Ray Dataset as an MDS data set, one folder for each write task that has rows.

    The index is written last, by the driver. A task that Ray runs again, because its worker or node died,
    leaves nothing: only the part that Ray takes is in the index, and others are deleted. If the job fails,
    all parts are deleted; if the driver is killed, the parts stay without an index, and a job with
    `exist_ok=True` deletes them. Samples are in the order of the tasks, and within a part in the order of the
    rows; tasks are in the order of the Dataset's blocks if `DataContext` has
    `execution_options.preserve_order = True`.

    Without `columns`, a column has the encoding of its type. A null whose encoding does not allow for it, and
    a column that is of another type in another task, fail the task. `infer_columns` reads the rows first and
    gives the encodings of `hocket-stream convert`; `write_mds` does both.

    Needs `pip install 'hocket-stream[ray]'` on all machines, and the same place and credentials on them.

    Args:
        out: A folder that all machines share, the URI of a store, or both as `(local, remote)`.
        columns: Encodings by column name, instead of those by type.
        min_rows_per_part: The number of rows that Ray collects for a task, so that parts are not small;
            without it, a block for each task.
        **settings: Arguments of `MDSWriter`, without `append` and `progress_bar`.

    Raises:
        ConfigError: A setting or an encoding is not valid, or Ray is not installed.
        DatasetExistsError: There is a data set at `out`, or another job writes to it, and `exist_ok` is not
            given.

    Example:
        >>> ray.data.read_parquet("s3://bucket/corpus").write_datasink(MDSSink("s3://bucket/train"))
    """

    def __init__(
        self,
        out: Place,
        *,
        columns: Mapping[str, str] | None = None,
        min_rows_per_part: int | None = None,
        **settings: Any,
    ) -> None:
        if _Datasink is None:
            raise ConfigError(
                "`MDSSink` needs Ray, which is not installed: `pip install 'hocket-stream[ray]'`"
            )
        if min_rows_per_part is not None and min_rows_per_part < 1:
            raise ConfigError(f"`min_rows_per_part` is {min_rows_per_part}: expected at least 1")
        super().__init__()
        self._columns = dict(columns or {})
        self._min_rows = min_rows_per_part
        self._job = open_job(out, columns, settings)
        self.report: ConvertReport | None = None
        """The number of samples and the encodings, after the data set is written."""

    def __repr__(self) -> str:
        return f"<MDSSink of {self._job!r}>"

    @property
    def min_rows_per_write(self) -> int | None:
        """The number of rows that Ray collects for a task."""
        return self._min_rows

    def get_name(self) -> str:
        """Return the name of the write tasks."""
        return "MDS"

    def on_write_start(self, schema: Any = None) -> None:
        """Claim the place; called by Ray on the driver before the first task."""
        self._job.start()

    def write(self, blocks: Iterable[Any], ctx: Any) -> WrittenPart | None:
        """Write blocks as a part; called by Ray in a task."""
        return write_part(self._job, ctx.task_idx, _tables(blocks), self._columns, by_type=True)

    def on_write_complete(self, write_result: Any) -> None:
        """Write the index over the parts that the tasks returned; called by Ray on the driver."""
        parts = [part for part in write_result.write_returns if part is not None]
        num_samples = self._job.commit(parts)
        self.report = ConvertReport(num_samples=num_samples, columns=parts[0].columns)

    def on_write_failed(self, error: Exception) -> None:
        """Delete the parts; called by Ray on the driver after an error."""
        self._job.abort()


def infer_columns(dataset: Any, columns: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the encodings that `hocket-stream convert` gives to a Dataset's columns; reads all rows.

    Args:
        dataset: The `ray.data.Dataset`. Its blocks are computed for this and again for writing; `materialize`
            it if that takes long, or if it gives other rows each time.
        columns: Encodings by column name, instead of the inferred ones.

    Raises:
        ConfigError: There are no rows, or a column has a type, or nulls, that no encoding holds.
    """
    given = dict(columns or {})

    def look(table: Any) -> Any:
        seen = look_at([_plain(table)])
        return {"facts": [pickle.dumps(seen)]}

    facts = SchemaFacts()
    for row in dataset.map_batches(look, batch_format="pyarrow", batch_size=None).iter_rows():
        facts.merge(pickle.loads(row["facts"]))
    return choose_columns(facts.encodings(given=set(given)), given)


def write_mds(
    dataset: Any,
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    min_rows_per_part: int | None = None,
    **settings: Any,
) -> ConvertReport:
    """Write a Ray Dataset by `MDSSink`, with the encodings of `infer_columns`.

    Arguments and errors are those of `MDSSink` and `infer_columns`.

    Returns:
        The number of samples, and the encoding of each column.
    """
    open_job(out, columns, settings)  # refuses before the first pass
    found = infer_columns(dataset, columns)
    sink = MDSSink(out, columns=found, min_rows_per_part=min_rows_per_part, **settings)
    dataset.write_datasink(sink)
    assert sink.report is not None
    return sink.report


def _tables(blocks: Iterable[Any]) -> Iterator[Any]:
    accessor = importlib.import_module("ray.data.block").BlockAccessor
    for block in blocks:
        table = accessor.for_block(block).to_arrow()
        if table.num_rows:
            yield _plain(table)


def _plain(table: Any) -> Any:
    """Return a table with the lists of Ray's arrays of different lengths.

    Raises:
        ConfigError: A column has arrays of several dims and different shapes, or Python objects.
    """
    extension = require("pyarrow", "ray").BaseExtensionType
    for number, field in enumerate(table.schema):
        if not isinstance(field.type, extension):
            continue
        if "object" in field.type.extension_name:
            raise ConfigError(
                f"column `{field.name}` has Python objects: expected values of a type of Arrow; make "
                "numbers, strings, bytes, lists or dicts of them by `map`"
            )
        if "variable_shaped" in field.type.extension_name:
            if field.type.ndim != 1:
                raise ConfigError(
                    f"column `{field.name}` has arrays of {field.type.ndim} dims and different shapes: "
                    "expected one shape; resize them, or encode them as bytes, images as JPEG or PNG, by "
                    "`map_batches`"
                )
            table = table.set_column(number, field.name, _lists(table.column(number)))
    return table


def _lists(column: Any) -> Any:
    """Return a column of arrays of one dim and different lengths as a column of lists."""
    storage = column.type.storage_type
    place = storage.get_field_index("data")
    lists = [chunk.storage.flatten()[place] for chunk in column.chunks]
    return require("pyarrow", "ray").chunked_array(lists, storage.field(place).type)
