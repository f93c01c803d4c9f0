"""Writing of record batches as parts of a job: the tasks of Ray and Spark call this."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hocket.stream.convert import arrow_types as kinds
from hocket.stream.convert.arrow_columns import SchemaFacts
from hocket.stream.convert.arrow_values import batch_samples, numbers
from hocket.stream.convert.sample_writer import check_output, choose_columns, require, write_converted
from hocket.stream.errors import ConfigError
from hocket.stream.write.output import Place
from hocket.stream.write.write_job import PartWriter, WriteJob, WrittenPart, check_same_columns

_ROWS = 1024


def open_job(out: Place, columns: Mapping[str, str] | None, settings: Mapping[str, Any]) -> WriteJob:
    """Return a job after a check of its place and its settings. Nothing is changed.

    Raises:
        ConfigError: A setting or an encoding is not valid.
        DatasetExistsError: The place is in use, and `exist_ok` is not given.
    """
    job = WriteJob(out, settings)
    check_output(out, columns, settings)
    job.check()
    return job


def write_part(
    job: WriteJob,
    number: int,
    batches: Iterable[Any],
    columns: Mapping[str, str] | None,
    *,
    by_type: bool = False,
) -> WrittenPart | None:
    """Write record batches as a part of a job.

    Args:
        job: The job.
        number: The number of the part.
        batches: Record batches, or tables; those without rows are skipped.
        columns: The encoding of each column.
        by_type: `columns` may leave columns out, whose encodings are those of their types if no value is
            null. All parts have to have the same.

    Returns:
        The part; None if there are no rows.

    Raises:
        ConfigError: The columns are not those of `columns`, or of other parts; or a value is null that its
            type does not allow for.
        SampleError: A value does not fit its column's encoding; the message has the number of the row.
    """
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    encodings = dict(columns or {})
    if by_type:
        encodings = columns_by_type(first.schema, encodings)
        job.agree_on_columns(encodings)
    check = _BatchCheck(encodings, given=columns or {}, by_type=by_type)
    with PartWriter(job, number, encodings) as writer:
        samples = (
            sample
            for batch in itertools.chain([first], filled)
            for piece in _slices(check(batch))
            for sample in batch_samples(piece, encodings)
        )
        write_converted(samples, encodings, writer, source=f"part {number}")
    return writer.part


def columns_by_type(schema: Any, given: Mapping[str, str]) -> dict[str, str]:
    """Return the encodings that columns have by their types alone, replaced by given ones.

    Raises:
        ConfigError: A column has files or no type, so that its encoding depends on its values; or a given
            column is not there.
    """
    arrow = require("pyarrow", "pyarrow")
    facts = SchemaFacts()
    facts.look(arrow.RecordBatch.from_pylist([], schema))
    for name, kind in facts.types.items():
        plain = kinds.plain_type(kind)
        inner = plain.value_type if kinds.is_list(plain) else plain
        if name not in given and (arrow.types.is_null(plain) or kinds.is_file(inner)):
            raise ConfigError(
                f"column `{name}` is of type {kind}, whose encoding depends on the values: give it in "
                f"`columns`, such as `{{'{name}': 'jpeg'}}`, or use `write_mds`, which reads the rows twice"
            )
    return choose_columns(facts.encodings(given=set(given)), given)


def look_at(batches: Iterable[Any]) -> SchemaFacts:
    """Return the facts about record batches, or tables, of which some columns may be of type null."""
    facts = SchemaFacts()
    for batch in batches:
        for piece in _slices(batch):
            seen = SchemaFacts()
            seen.look(piece)
            facts.merge(seen)
    return facts


class _BatchCheck:
    """A check that record batches have the columns of their part."""

    def __init__(self, encodings: Mapping[str, str], *, given: Mapping[str, str], by_type: bool) -> None:
        self._encodings = encodings
        self._given = given
        self._by_type = by_type
        self._schema: Any = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch.

        Raises:
            ConfigError: Its columns are others, or one has nulls whose encoding is that of its type.
        """
        if self._schema != batch.schema:
            by_type = columns_by_type(batch.schema, self._given) if self._by_type else {}
            # Without `by_type`, the types were compared when the encodings were inferred.
            found = {name: by_type.get(name, self._encodings.get(name, "new")) for name in batch.schema.names}
            check_same_columns(self._encodings, found)
            self._schema = batch.schema
        for name, column in zip(batch.schema.names, batch.columns, strict=True) if self._by_type else ():
            if name not in self._given and self._encodings[name] != "json" and _has_nulls(column):
                raise ConfigError(
                    f"column `{name}` has nulls, and is `{self._encodings[name]}` by its type: give its "
                    f"encoding in `columns`, such as `{{'{name}': 'json'}}`, fill the nulls, or use "
                    "`write_mds`, which reads the rows twice and finds them first"
                )
        return batch


def _has_nulls(column: Any) -> bool:
    chunks = getattr(column, "chunks", [column])
    return any(
        chunk.null_count or ((items := numbers(kinds.plain_column(chunk))) is not None and items.null_count)
        for chunk in chunks
    )


def _slices(batch: Any) -> Iterator[Any]:
    """Yield record batches of at most 1024 rows, so that few rows are held as Python objects."""
    if hasattr(batch, "to_batches"):
        yield from batch.to_batches(max_chunksize=_ROWS)
    else:
        yield from (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))
