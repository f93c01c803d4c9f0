"""Conversion of JSON lines and JSON files, plain or compressed."""

from __future__ import annotations

import codecs
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hocket.stream.convert.sample_writer import ConvertReport, check_output, choose_columns, write_samples
from hocket.stream.convert.sources import SourceFiles, find_files, source_path, walk
from hocket.stream.convert.text_files import open_bytes, with_compression
from hocket.stream.errors import SampleError
from hocket.stream.write.output import Place

logger = logging.getLogger("hocket.stream")

SUFFIXES = with_compression(".jsonl", ".ndjson")
#: In a folder these are read only if there are none of `SUFFIXES`, which often have metadata beside them.
JSON_SUFFIXES = with_compression(".json")

_EXACT_IN_FLOAT = 1 << 53


def from_jsonl(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert JSON lines to a data set.

    Integers become `int` (`str_int` beyond 64 bits), other numbers `float64`, strings `str`. A column with
    several types, with null, or that some objects lack becomes `json`, with null for missing values.

    A `.json` file may have an object on each line, an array of objects, or one object, which is one sample;
    the last two are read as a whole. Folders named `date=2020-01-01` become columns, as in `from_parquet`.

    Args:
        source: A file, or a folder: its `.jsonl` and `.ndjson` files, or if it has none, its `.json` files,
            by name, also behind links to folders, without hidden ones. They may end with `.gz`, `.bz2`,
            `.xz` or `.zst` too.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones, such as `{"tokens":
            "ndarray:uint16"}`.
        split: The split to read if the folder has files of several: `train`, `validation` or `test`; `all` to
            merge them.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A line is not a JSON object, or a value does not fit a given encoding.
        SourceNotFoundError: The source does not exist.
        ConfigError: The source has no samples, or no files with a known name; files belong to several splits.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    check_output(out, columns, settings)
    found = find_files(source, _suffixes(source_path(source)), split=split, columns=columns)
    kinds = choose_columns(_infer(_read(found)), columns)
    nulls = dict.fromkeys(kinds)
    return write_samples(({**nulls, **sample} for sample in _read(found)), kinds, out, settings)


def _suffixes(path: Path) -> tuple[str, ...]:
    """Return the suffixes of the files to read in a folder, and name the JSON files that are not read."""
    names = [file.name.lower() for file in walk(path)] if path.is_dir() else []
    if not any(name.endswith(SUFFIXES) for name in names):
        return SUFFIXES + JSON_SUFFIXES
    if others := [name for name in names if name.endswith(JSON_SUFFIXES)]:
        logger.warning("%d JSON files beside JSON lines are not read, such as `%s`", len(others), others[0])
    return SUFFIXES


def _read(source: SourceFiles) -> Iterator[dict[str, Any]]:
    for path in source.files:
        with open_bytes(path) as file:
            is_json = path.name.lower().endswith(JSON_SUFFIXES)
            for sample in _json_values(file, path) if is_json else _lines(file, path):
                yield source.add_partition(sample, path)


def _lines(lines: Iterable[bytes], path: Path, *, first: int = 1) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, first):
        if line.strip():
            sample = _parse(line, path, "line", number)
            if not isinstance(sample, dict):
                raise _not_an_object(sample, path, f"line {number}")
            yield sample


def _json_values(file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON file: those of its lines, the elements of an array, or the only one."""
    number, head = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (1, b""))
    if not head:
        return
    if _is_json(head) and not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _lines(itertools.chain([head], file), path, first=number)
        return
    whole = _parse(head + file.read(), path, "as a", "whole")
    for number, sample in enumerate(whole if isinstance(whole, list) else [whole]):
        if not isinstance(sample, dict):
            raise _not_an_object(sample, path, f"element {number}")
        yield sample


def _not_an_object(value: Any, path: Path, place: str) -> SampleError:
    return SampleError(f"`{path}` {place} is {json.dumps(value)[:40]!r}: expected a JSON object")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(text: bytes, path: Path, *place: object) -> Any:
    """Return the value of JSON text; `place` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"`{path}` {' '.join(map(str, place))} is not valid JSON: {error}") from None


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
