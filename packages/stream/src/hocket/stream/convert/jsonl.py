"""Conversion of JSON lines, in plain or gzipped files."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert.sample_writer import Converted, choose_columns, source_files, write_samples
from hocket.stream.errors import SampleError
from hocket.stream.output import Place

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

_EXACT_IN_FLOAT = 1 << 53


def from_jsonl(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Convert JSON lines to a data set.

    Integers become `int` (`str_int` beyond 64 bits), other numbers `float64`, strings `str`. A column with
    several types, with null, or that some objects lack becomes `json`, with null for missing values.

    Args:
        source: A file, or a folder: its `.jsonl` and `.ndjson` files, gzipped or not, by name.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones, such as `{"tokens":
            "ndarray:uint16"}`.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A line is not a JSON object, or a value does not fit a given encoding.
        SourceNotFoundError: The source does not exist.
        ConfigError: The source has no samples, or no files with a known name.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    files = source_files(source, SUFFIXES)
    kinds = choose_columns(_infer(_read(files)), columns)
    nulls = dict.fromkeys(kinds)
    return write_samples(({**nulls, **sample} for sample in _read(files)), kinds, out, settings)


def _read(files: list[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SampleError(f"`{path}` line {number} is not valid JSON: {error}") from None
            if not isinstance(sample, dict):
                raise SampleError(f"`{path}` line {number} is {line[:40]!r}: expected a JSON object")
            yield sample


def _lines(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(".gz"):
        with path.open("rb") as plain:
            yield from plain
        return
    try:
        with gzip.open(path) as packed:
            yield from packed
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SampleError(f"`{path}` is not a gzip file, or is damaged: {error}") from None


def _infer(samples: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    types_by_name: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    total = 0
    for sample in samples:
        total += 1
        for name, value in sample.items():
            types_by_name.setdefault(name, set()).add(_type(value))
            counts[name] = counts.get(name, 0) + 1
    return {
        name: _encoding(types) if counts[name] == total else "json" for name, types in types_by_name.items()
    }


def _type(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return "other"
    if isinstance(value, int):
        if abs(value) <= _EXACT_IN_FLOAT:
            return "int"
        return "wide" if -(1 << 63) <= value < 1 << 63 else "huge"
    return "float" if isinstance(value, float) else "str"


def _encoding(types: set[str]) -> str:
    if types <= {"int", "wide"}:
        return "int"
    if types <= {"int", "wide", "huge"}:
        return "str_int"
    if types <= {"int", "float"}:
        return "float64"
    return "str" if types == {"str"} else "json"
