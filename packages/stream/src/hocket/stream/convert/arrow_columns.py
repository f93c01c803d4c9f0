"""Encodings of Arrow columns, inferred from their types and values."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hocket.stream.convert import arrow_types as kinds
from hocket.stream.convert.arrow_values import lengths, numbers
from hocket.stream.convert.sample_writer import require
from hocket.stream.encodings.images import is_image
from hocket.stream.errors import ConfigError

logger = logging.getLogger("hocket.stream")

#: Bytes that tell the format of an image.
_HEAD_BYTES = 12


@dataclass(slots=True)
class _ColumnFacts:
    """Facts about the values of a column."""

    has_nulls: bool = False
    num_empty: int = 0
    """Empty rows of a column of arrays."""
    has_paths: bool = False
    is_png: bool = True
    is_image: bool = True

    def merged(self, other: _ColumnFacts) -> _ColumnFacts:
        """Return the facts about the values of both."""
        return _ColumnFacts(
            has_nulls=self.has_nulls or other.has_nulls,
            num_empty=self.num_empty + other.num_empty,
            has_paths=self.has_paths or other.has_paths,
            is_png=self.is_png and other.is_png,
            is_image=self.is_image and other.is_image,
        )


class SchemaFacts:
    """The types of the columns of record batches and facts about their values, as far as they were seen.

    Tasks of a job look at a part each; pickled, their facts are merged.
    """

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self._seen: dict[str, _ColumnFacts] = {}

    def __repr__(self) -> str:
        return f"<SchemaFacts of {self.types}>"

    def look(self, batch: Any) -> None:
        """Add a record batch.

        Raises:
            ConfigError: It has a column twice, or other columns than those before it.
        """
        types = dict(zip(batch.schema.names, batch.schema.types, strict=True))
        if len(types) != batch.num_columns or (self.types and types != self.types):
            raise ConfigError(
                f"the columns are {batch.schema}: expected each name once, the same in all batches"
            )
        self.types = types
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            _look(kinds.plain_column(column), self._seen.setdefault(name, _ColumnFacts()))

    def merge(self, other: SchemaFacts) -> None:
        """Add what another one has seen.

        A column of type null fits any other, and arrays of one dim may have different lengths.

        Raises:
            ConfigError: The columns differ.
        """
        if not self.types or not other.types:
            self.types, self._seen = (self.types, self._seen) if self.types else (other.types, other._seen)
            return
        for name in dict.fromkeys([*self.types, *other.types]):
            first, second = self.types.get(name), other.types.get(name)
            common = None if first is None or second is None else _common_type(first, second)
            if common is None:
                raise ConfigError(
                    f"column `{name}` is {second or 'missing'} in one part of the source and "
                    f"{first or 'missing'} in another: expected the same in all; cast the column, or drop it"
                )
            self.types[name] = common
            self._seen[name] = self._seen[name].merged(other._seen[name])

    def encodings(self, *, given: Collection[str]) -> dict[str, str]:
        """Return the encoding of each column, and log what a reader may not expect; see `infer_columns`.

        Raises:
            ConfigError: No encoding holds a column.
        """
        columns: dict[str, str] = {}
        for name, kind in self.types.items():
            if name in given:
                columns[name] = "given"
            else:
                columns[name] = _encoding(name, kinds.plain_type(kind), self._seen[name])
                _warn(name, columns[name], kinds.plain_type(kind), self._seen[name])
                if kinds.is_extension(kind) and kinds.plain_type(kind) != kind:
                    logger.warning(
                        "column `%s` is of type %s: the values of its storage, %s, are written",
                        name,
                        kind,
                        kind.storage_type,
                    )
        return columns


def infer_columns(batches: Iterable[tuple[Path, Any]], *, given: Collection[str]) -> dict[str, str]:
    """Return the encoding of each column of the files of a source.

    Files may differ as `SchemaFacts.merge` allows, such as by a column that is empty in one of them.

    Logs a warning for each column of arrays in which some rows are empty, for each column that becomes `json`
    only because some values are null, for names of files that are left out, for binary within `json`, and for
    extension types of which only the storage is known.

    Args:
        batches: The record batches of a source, each with its file.
        given: Names of columns whose encoding the caller gives; they are `given` in the result.

    Raises:
        ConfigError: The columns of files differ, or no encoding holds a column.
    """
    facts = SchemaFacts()
    for path, group in itertools.groupby(batches, key=operator.itemgetter(0)):
        of_file = SchemaFacts()
        for _, batch in group:
            with _named(path):
                of_file.look(batch)
        with _named(path):
            facts.merge(of_file)
    return facts.encodings(given=given)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the name of a file before the message of an error."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"`{path}`: {error}") from None


def _common_type(first: Any, second: Any) -> Any:
    """Return the type of a column that has these types in two parts; None if there is none.

    Null fits any type, and arrays of one dim and different lengths are lists.
    """
    arrow = require("pyarrow", "pyarrow")
    if first == second or arrow.types.is_null(second):
        return first
    if arrow.types.is_null(first):
        return second
    element = kinds.element(first)
    is_flat = all(
        len(kinds.array_shape(kind) or (0,)) == 1 and not kinds.inner_shape(kind) for kind in (first, second)
    )
    if element is None or element != kinds.element(second) or not is_flat:
        return None
    return arrow.list_(element)


def _look(column: Any, seen: _ColumnFacts) -> None:
    """Add the facts about a column of one batch."""
    items = numbers(column)
    if column.null_count or (items is not None and items.null_count):
        seen.has_nulls = True
    elif items is not None and kinds.array_shape(column.type) is None:
        seen.num_empty += lengths(column).count(0)
    files = column.flatten() if _holds_files(column.type) and kinds.is_list(column.type) else column
    if not kinds.is_file(files.type):
        return
    by_name = dict(zip((field.name for field in files.type), files.flatten(), strict=True))
    seen.has_paths |= by_name["path"].null_count < len(files)
    seen.has_nulls |= by_name["bytes"].null_count > 0
    for value in by_name["bytes"] if seen.is_image else ():
        head = value.as_buffer()[:_HEAD_BYTES].to_pybytes() if value.is_valid else b""
        if head:
            seen.is_png = seen.is_png and head.startswith(b"\x89PNG")
            seen.is_image = seen.is_image and is_image(head)


def _holds_files(kind: Any) -> bool:
    return kinds.is_file(kind) or (kinds.is_list(kind) and kinds.is_file(kind.value_type))


def _warn(name: str, encoding: str, kind: Any, seen: _ColumnFacts) -> None:
    """Log what a reader of the data set may not expect in a column."""
    if encoding.startswith("ndarray") and seen.num_empty:
        logger.warning(
            "column `%s` has %d empty lists, which become arrays of length 0 beside those of `%s`; give its "
            "encoding as `json` for lists",
            name,
            seen.num_empty,
            encoding,
        )
    if encoding != "json" and _holds_files(kind) and seen.has_paths:
        logger.warning(
            "column `%s` has files with names: their bytes become `%s`, and the names are left out",
            name,
            encoding,
        )
    if encoding != "json":
        return
    if (without_nulls := _encoding(name, kind, replace(seen, has_nulls=False))) != "json":
        logger.warning(
            "column `%s` has nulls and becomes `json`; fill or drop them, and it becomes `%s`",
            name,
            without_nulls,
        )
    binary = [path for path, leaf in kinds.leaves(kind, name) if kinds.is_binary(leaf)]
    if binary:
        logger.warning(
            "column `%s` becomes `json`, with its binary values (%s) as text in Base64",
            name,
            ", ".join(binary),
        )


def _encoding(name: str, kind: Any, seen: _ColumnFacts) -> str:
    types = require("pyarrow", "pyarrow").types
    for path, leaf in kinds.leaves(kind, name):
        if types.is_duration(leaf) or types.is_interval(leaf) or types.is_union(leaf):
            raise ConfigError(
                f"column `{path}` is of type {leaf}, which no encoding supports: cast it, or drop it"
            )
    if _holds_files(kind):
        return _file_encoding(name, kind, seen)
    if kinds.is_binary(kind) or types.is_decimal(kind):
        if seen.has_nulls:
            raise ConfigError(
                f"column `{name}` is of type {kind} and has nulls: expected a value in every row"
            )
        return "bytes" if kinds.is_binary(kind) else "str_decimal"
    if seen.has_nulls:
        return "json"
    if kinds.is_string(kind) or kinds.is_time(kind) or kinds.is_uuid(kind):
        return "str"
    if (number := kinds.number(kind)) is not None:
        return number
    if (number := kinds.number(kinds.element(kind))) is not None:
        shape, axes = kinds.array_shape(kind), kinds.axes(kind)
        dims = shape if shape is None or axes is None else [shape[axis] for axis in axes]
        return f"ndarray:{number}" + (":" + ",".join(map(str, dims)) if dims else "")
    return "json"


def _file_encoding(name: str, kind: Any, seen: _ColumnFacts) -> str:
    """Return the encoding of files, or of lists of files."""
    if seen.has_nulls:
        raise ConfigError(
            f"column `{name}` has files or images without bytes: expected them in the data, not as paths, "
            "and in every row"
        )
    if not kinds.is_list(kind):
        return ("png" if seen.is_png else "jpeg") if seen.is_image else "bytes"
    if not seen.is_image:
        return "json"
    return "list[png]" if seen.is_png else "list[jpeg]"
