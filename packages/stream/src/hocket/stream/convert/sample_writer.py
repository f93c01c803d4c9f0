"""Functions shared by all converters: choice of columns, files of a source, and writing of samples."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.stream.errors import ConfigError, SampleError, SourceNotFoundError
from hocket.stream.output import Place, is_local, local_path
from hocket.stream.writer import MDSWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The result of a conversion."""

    num_samples: int

    columns: dict[str, str]
    """Encoding by column name."""


def choose_columns(inferred: Mapping[str, str], given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the inferred encodings, replaced by given ones.

    Raises:
        ConfigError: The source has no columns, or a given column is not among them.
    """
    if not inferred:
        raise ConfigError("the source has no samples: expected at least one, to infer the columns")
    unknown = sorted(set(given or {}) - set(inferred))
    if unknown:
        raise ConfigError(f"`columns` names {unknown}: expected columns of the source, {sorted(inferred)}")
    return {**inferred, **(given or {})}


def write_samples(
    samples: Iterable[Mapping[str, Any]], columns: Mapping[str, str], out: Place, settings: Mapping[str, Any]
) -> Converted:
    """Write samples as an MDS data set.

    Raises:
        SampleError: A value does not fit its column's encoding; the message has the number of the sample.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    arrays = {name: kind.split(":") for name, kind in columns.items() if kind.startswith("ndarray")}
    number = 0
    with MDSWriter(columns=columns, out=out, **settings) as writer:
        for sample in samples:
            try:
                writer.write({**sample, **{name: _array(sample[name], arrays[name]) for name in arrays}})
            except SampleError as error:
                raise SampleError(f"sample {number} of the source: {error}") from None
            number += 1
    return Converted(num_samples=number, columns=dict(columns))


def _array(value: Any, kind: list[str]) -> Any:
    """Convert a list or array to its column's type. Floats may lose digits; other values may not change."""
    if not isinstance(value, (list, np.ndarray)):
        return value
    try:
        array = np.asarray(value)
        if len(kind) == 1 or array.dtype.name == kind[1]:
            return array
        converted = array.astype(kind[1])
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"{error}: expected a list that `{':'.join(kind)}` holds") from None
    if converted.dtype.kind != "f" and not np.array_equal(converted, array):
        raise SampleError(
            f"{value!r:.60} changes as {kind[1]}: expected numbers that this type can represent"
        )
    return converted


def source_files(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return `source` if it is a file, else the files below it with one of the suffixes, sorted by name.

    Raises:
        SourceNotFoundError: `source` does not exist.
        ConfigError: There is no such file below it, or `source` is not a local path.
    """
    path = source_path(source)
    if path.is_file():
        return [path]
    files = sorted(
        file for file in path.rglob("*") if file.name.lower().endswith(suffixes) and file.is_file()
    )
    if not files:
        raise ConfigError(f"there is no file in `{path}` that ends with {', '.join(suffixes)}: expected one")
    return files


def source_path(source: str | os.PathLike[str]) -> Path:
    """Return the local path of a source.

    Raises:
        SourceNotFoundError: It does not exist.
        ConfigError: It is not a local path.
    """
    if not is_local(os.fspath(source)):
        raise ConfigError(
            f"the source `{source}` is in an object store: expected a local path; download the source first"
        )
    path = local_path(os.fspath(source))
    if not path.exists():
        raise SourceNotFoundError(f"the source `{path}` does not exist: expected a file or a folder")
    return path


def require(module: str, extra: str) -> Any:
    """Import a library that only some sources need.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"this source needs `{module}`, which is not installed: `pip install 'hocket-stream[{extra}]'`"
        ) from None
