"""Functions shared by all converters: choice of columns, and writing of samples."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.stream.encodings.images import is_image, open_image
from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.write.output import Place
from hocket.stream.write.writer import MDSWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """The result of a conversion."""

    num_samples: int

    columns: dict[str, str]
    """Encoding by column name."""


class _UnopenedWriter(MDSWriter):
    """A writer that checks its arguments and its output location, and changes nothing."""

    def _open(self, *, exist_ok: bool, append: bool) -> None:
        if append:
            self._output.open_existing()
        else:
            self._output.make_room(exist_ok=exist_ok, dry_run=True)
        self._close()


_UnopenedWriter.__name__ = MDSWriter.__name__  # for the message on an unknown argument


def check_output(out: Place, columns: Mapping[str, str] | None, settings: Mapping[str, Any]) -> None:
    """Refuse an output location, an encoding or a setting that cannot be used, before the source is read.

    Raises:
        ConfigError: A setting or an encoding is not valid.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    # The inferred encodings, which are all valid, are not known yet.
    _UnopenedWriter(columns=columns or {"any": "bytes"}, out=out, **{**settings, "progress_bar": False})


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
) -> ConvertReport:
    """Write samples as an MDS data set.

    Raises:
        SampleError: A value does not fit its column's encoding; the message has the number of the sample.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    with MDSWriter(columns=columns, out=out, **settings) as writer:
        number = write_converted(samples, columns, writer, source="the source")
    return ConvertReport(num_samples=number, columns=dict(columns))


def write_converted(
    samples: Iterable[Mapping[str, Any]], columns: Mapping[str, str], writer: MDSWriter, *, source: str
) -> int:
    """Write samples to an open writer, with lists as arrays and files as images where columns are such.

    Returns:
        The number of samples.

    Raises:
        SampleError: A value does not fit its column's encoding; the message has the number of the sample.
    """
    converters: dict[str, Callable[[Any], Any]] = {
        name: functools.partial(_array, kind=kind.split(":"))
        for name, kind in columns.items()
        if kind.startswith("ndarray")
    }
    converters |= {name: _raw_image for name, kind in columns.items() if kind == "pil"}
    number = 0
    for sample in samples:
        try:
            writer.write({**sample, **{name: convert(sample[name]) for name, convert in converters.items()}})
        except SampleError as error:
            raise SampleError(f"sample {number} of {source}: {error}") from None
        number += 1
    return number


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


def _raw_image(value: Any) -> Any:
    """Decode the file of an image for a column of raw images."""
    return open_image(value) if isinstance(value, bytes) and is_image(value) else value


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
