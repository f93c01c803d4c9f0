"""Conversion of comma- and tab-separated values, plain or compressed."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

from hocket.stream.convert.sample_writer import ConvertReport, check_output, choose_columns, write_samples
from hocket.stream.convert.sources import SourceFiles, find_files
from hocket.stream.convert.text_files import open_bytes, with_compression
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.write.output import Place

logger = logging.getLogger("hocket.stream")

CSV_SUFFIXES = with_compression(".csv")
TSV_SUFFIXES = with_compression(".tsv")

#: Separators of `.csv` files whose first row has no comma.
_OTHER_SEPARATORS = (";", "\t", "|")
_NAMED_SEPARATOR = re.compile(r"sep=(.)")

# Leading zeros, as in postal codes, and `+`, as in telephone numbers, would be lost in a number.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_EXACT_IN_FLOAT = 1 << 53
_MAX_FIELD_BYTES = (1 << 31) - 1


def from_csv(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    empty_as_nan: bool = False,
    **settings: Any,
) -> ConvertReport:
    """Convert comma-separated values to a data set.

    The first row of each file has the names of the columns. Columns of integers become `int` (`str_int`
    beyond 64 bits), columns of decimal numbers `float64`, others `str`; numbers with leading zeros or `+` are
    text. An empty field is null in a column of numbers, which then becomes `json`, with a warning; or NaN,
    if `empty_as_nan`.

    If the first row has no comma, a file may be separated by `;`, tabs or `|`; a row `sep=;` before it, as
    spreadsheets write it, names the separator. Folders named `date=2020-01-01` become columns, as in
    `from_parquet`.

    Args:
        source: A file in UTF-8, or a folder: its `.csv` files, by name, also behind links to folders, without
            hidden ones. They may end with `.gz`, `.bz2`, `.xz` or `.zst` too.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones. `ndarray` takes fields that are JSON
            lists, such as `"[1, 2]"`.
        split: The split to read if the folder has files of several: `train`, `validation` or `test`; `all` to
            merge them.
        empty_as_nan: Whether an empty field, or one of spaces, is NaN in a column of numbers, which becomes
            `float64`; integers that a `float64` cannot hold stay `json`.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A row has more or fewer fields than the first one, a file is not valid, or a value does
            not fit a given encoding.
        SourceNotFoundError: The source does not exist.
        ConfigError: The source has no samples, or no files with a known name; files have different columns,
            or belong to several splits.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    check_output(out, columns, settings)
    return _convert(
        find_files(source, CSV_SUFFIXES, split=split, columns=columns),
        ",",
        out,
        columns,
        settings,
        empty_as_nan=empty_as_nan,
    )


def from_tsv(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    empty_as_nan: bool = False,
    **settings: Any,
) -> ConvertReport:
    """Convert tab-separated values to a data set; arguments, types and errors are those of `from_csv`."""
    check_output(out, columns, settings)
    return _convert(
        find_files(source, TSV_SUFFIXES, split=split, columns=columns),
        "\t",
        out,
        columns,
        settings,
        empty_as_nan=empty_as_nan,
    )


def _convert(
    source: SourceFiles,
    separator: str,
    out: Place,
    columns: Mapping[str, str] | None,
    settings: Mapping[str, Any],
    *,
    empty_as_nan: bool,
) -> ConvertReport:
    inferred = _infer(_rows(source, separator), empty_as_nan=empty_as_nan)
    kinds = choose_columns(inferred, columns)
    parsers = {name: _parser(kind, empty_as_nan=empty_as_nan) for name, kind in kinds.items()}

    def samples() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(_rows(source, separator)):
            try:
                yield {name: parsers[name](text) for name, text in row.items()}
            except (ValueError, ArithmeticError) as error:
                bad_fields = {name: text for name, text in row.items() if not _fits(parsers[name], text)}
                mismatches = ", ".join(
                    f"`{name}`: {text!r:.60} is not {kinds[name]}" for name, text in bad_fields.items()
                )
                raise SampleError(f"sample {number} of the source: column {mismatches} ({error})") from None

    return write_samples(samples(), kinds, out, settings)


def _rows(source: SourceFiles, separator: str) -> Iterator[dict[str, str]]:
    names: list[str] | None = None
    for path in source.files:
        partition = {
            name: "" if value is None else str(value)
            for name, value in source.partitions.get(path, {}).items()
        }
        with _reader(path, separator) as reader:
            head = next(reader, None)
            if not head:
                continue
            if names is None:
                names = head
                if len(set(names)) != len(names):
                    raise ConfigError(f"`{path}` has the columns {names}: expected each name once")
            elif set(head) != set(names):
                raise ConfigError(
                    f"`{path}` has the columns {head}: expected those of `{source.files[0]}`, {names}"
                )
            for row in reader:
                if len(row) != len(head):
                    if not row:
                        continue
                    raise SampleError(
                        f"`{path}` line {reader.line_num} has {len(row)} fields: expected {len(head)}, as in "
                        "its first row"
                    )
                fields = dict(zip(head, row, strict=True))
                if partition:  # as text, as all fields are here
                    fields = {**source.add_partition(dict(fields), path), **partition, **fields}
                yield fields


@contextlib.contextmanager
def _reader(path: Path, separator: str) -> Iterator[Any]:
    """Open a file and yield a reader of its rows; fields may be larger than the `csv` module allows."""
    previous_limit = csv.field_size_limit(_MAX_FIELD_BYTES)
    try:
        num_lines = 0
        if separator == ",":
            with _open(path) as text:
                separator, num_lines = _find_separator(text)
        with _open(path) as text:
            yield csv.reader(itertools.islice(text, num_lines, None), delimiter=separator, strict=True)
    except csv.Error as error:
        raise SampleError(f"`{path}` is not valid: {error}") from None
    except UnicodeDecodeError as error:
        raise SampleError(f"`{path}` is not UTF-8: {error}; convert it first") from None
    finally:
        csv.field_size_limit(previous_limit)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    # Spreadsheets begin a file with a byte order mark.
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield text


def _find_separator(text: TextIO) -> tuple[str, int]:
    """Return the separator of a CSV file, and the number of lines before its first row."""
    lines: list[str] = []
    try:
        head = next(csv.reader(_kept(text, lines), strict=True), [])
    except csv.Error:  # such as `"a";"b"`
        head = [""]
    if lines and (named := _NAMED_SEPARATOR.fullmatch(lines[0].rstrip("\r\n"))):
        return named[1], 1
    for other in _OTHER_SEPARATORS if len(head) == 1 else ():
        with contextlib.suppress(csv.Error):
            if len(next(csv.reader(lines, delimiter=other, strict=True))) > 1:
                return other, 0
    return ",", 0


def _kept(text: TextIO, lines: list[str]) -> Iterator[str]:
    for line in text:
        lines.append(line)
        yield line


def _infer(rows: Iterable[Mapping[str, str]], *, empty_as_nan: bool = False) -> dict[str, str]:
    types_by_name: dict[str, set[str]] = {}
    for row in rows:
        for name, text in row.items():
            is_blank = empty_as_nan and text.isspace()
            types_by_name.setdefault(name, set()).add("empty" if is_blank else _type(text))
    columns: dict[str, str] = {}
    for name, types in types_by_name.items():
        columns[name] = _encoding(types - {"empty"})
        if "empty" in types and empty_as_nan and types <= {"empty", "int", "float"} and types != {"empty"}:
            columns[name] = "float64"
        elif "empty" in types and columns[name] != "str":
            logger.warning(
                "column `%s` has empty fields beside numbers and becomes `json`; fill them, and it becomes "
                "`%s`, or pass `empty_as_nan=True` (`--empty-as-nan`)",
                name,
                columns[name],
            )
            columns[name] = "json"
    return columns


def _type(text: str) -> str:
    if not text:
        return "empty"
    if _INTEGER.fullmatch(text):
        # Longer ones are beyond 64 bits, and slow to convert.
        number = int(text) if len(text) <= 20 else 1 << 64
        if abs(number) <= _EXACT_IN_FLOAT:
            return "int"
        return "wide" if -(1 << 63) <= number < 1 << 63 else "huge"
    return "float" if _FLOAT.fullmatch(text) else "text"


def _encoding(types: set[str]) -> str:
    if not types:
        return "str"
    if types <= {"int", "wide"}:
        return "int"
    if types <= {"int", "wide", "huge"}:
        return "str_int"
    return "float64" if types <= {"int", "float"} else "str"


def _parser(kind: str, *, empty_as_nan: bool = False) -> Callable[[str], Any]:
    """Return the function that converts a field to a value for an encoding."""
    if empty_as_nan and kind in SCALARS and "float" in kind:
        return _float_or_nan
    if kind in ("int", "str_int") or (kind in SCALARS and "float" not in kind):
        return int
    if kind == "str_float" or kind in SCALARS:
        return float
    if kind.startswith("ndarray"):
        return _list
    parsers: dict[str, Callable[[str], Any]] = {
        "json": _number_or_text,
        "str_decimal": Decimal,
        "bytes": str.encode,
    }
    return parsers.get(kind, str)


def _float_or_nan(text: str) -> float:
    return float(text) if text.strip() else math.nan


def _number_or_text(text: str) -> Any:
    """Return null for an empty field, a number if the field is one, else the text."""
    kind = _type(text)
    if kind == "empty":
        return None
    return text if kind == "text" else json.loads(text)


def _list(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError("expected a JSON list")
    return value


def _fits(parse: Callable[[str], Any], text: str) -> bool:
    try:
        parse(text)
    except (ValueError, ArithmeticError):
        return False
    return True
