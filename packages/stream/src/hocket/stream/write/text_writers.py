"""Writers of JSON-lines and separated-value shards, each with a file of sample offsets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.write.output import Place
from hocket.stream.write.writer import Writer

_TYPES: dict[str, type[str | int | float]] = {"str": str, "int": int, "float": float}


class _TextWriter(Writer):
    """Base class: columns of three types, a newline, and two files per shard."""

    def __init__(
        self, *, columns: Mapping[str, str], out: Place, newline: str = "\n", **settings: Any
    ) -> None:
        for name, kind in columns.items():
            if kind not in _TYPES:
                raise ConfigError(f"column `{name}` has the type `{kind}`: expected one of {list(_TYPES)}")
        if not newline:
            raise ConfigError("`newline` is empty: expected the end of a sample, such as '\\n'")
        self._newline = newline
        super().__init__(columns=columns, out=out, **settings)

    def _values(self, sample: Mapping[str, Any]) -> list[Any]:
        """Return a sample's values in the order of columns.

        Raises:
            SampleError: A value is missing or does not have its column's type.
        """
        values: list[Any] = []
        for name, kind in self._columns.items():
            if name not in sample:
                raise SampleError(f"the sample has no `{name}`: expected all of {list(self._columns)}")
            value: Any = sample[name]
            if not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
                raise SampleError(f"column `{name}`: {value!r} is a {type(value).__name__}: expected {kind}")
            if kind == "int" and not -(1 << 63) <= int(value) < 1 << 63:
                raise SampleError(f"column `{name}`: {value} does not fit: expected an integer of 64 bits")
            if isinstance(value, str):
                _check_utf8(name, value)
            values.append(value)
        return values

    def _push(self, sample: Mapping[str, Any]) -> int:
        return self._samples.push_bytes(self._encode(sample))

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        raise NotImplementedError

    def _head(self) -> bytes:
        return b""


def _check_utf8(name: str, value: str) -> None:
    """Raise for a lone surrogate, which JSON accepts and UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"column `{name}`: {value!r:.200}: {error}: expected a string that UTF-8 can encode"
        ) from None


class JSONWriter(_TextWriter):
    r"""A writer of samples as JSON objects, one per line, with columns of `str`, `int` and `float`.

    Arguments, errors and crash safety are those of `Writer`; `newline` ends a sample (`\n` by default). NaN
    and infinities raise, because JSON has none.
    """

    _format = "json"

    def _describe_columns(self) -> dict[str, Any]:
        return {"columns": self._columns, "newline": self._newline}

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        values = dict(zip(self._columns, self._values(sample), strict=True))
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SampleError(f"column `{name}`: {value} is not valid JSON: expected a finite number")
        return (json.dumps(values, sort_keys=True) + self._newline).encode()


class XSVWriter(_TextWriter):
    r"""A writer of samples as values between separators, with columns of `str`, `int` and `float`.

    Arguments, errors and crash safety are those of `Writer`, with two more arguments. There is no quoting: a
    string that contains the separator or the newline raises.

    Args:
        separator: Text between two values.
        newline: Text at the end of a sample; `\n` by default.
    """

    _format = "xsv"

    def __init__(self, *, columns: Mapping[str, str], separator: str, out: Place, **settings: Any) -> None:
        if not separator:
            raise ConfigError("`separator` is empty: expected the text between two values, such as ','")
        self._separator = separator
        super().__init__(columns=columns, out=out, **settings)

    def _describe_columns(self) -> dict[str, Any]:
        for name in self._columns:
            self._check(name, f"the name of column `{name}`", ConfigError)
        self._check_split(list(self._columns), "a column's name", ConfigError)
        return {
            "column_encodings": list(self._columns.values()),
            "column_names": list(self._columns),
            "newline": self._newline,
            "separator": self._separator,
        }

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        values = [str(value) for value in self._values(sample)]
        for name, value in zip(self._columns, values, strict=True):
            self._check(value, f"column `{name}`", SampleError)
        self._check_split(values, "a value", SampleError)
        return self._line(values)

    def _head(self) -> bytes:
        return self._line(list(self._columns))

    def _line(self, values: list[str]) -> bytes:
        return (self._separator.join(values) + self._newline).encode()

    def _check(self, value: str, what: str, error: type[ConfigError | SampleError]) -> None:
        for mark in (self._separator, self._newline):
            if mark in value:
                raise error(
                    f"{what} holds {mark!r}: expected a string without it, because the format has no quoting"
                )

    def _check_split(self, values: list[str], what: str, error: type[ConfigError | SampleError]) -> None:
        """Raise if values would be split at another place, such as `x:` before the separator `::`."""
        line = self._separator.join(values) + self._newline
        read_back = line[: line.index(self._newline)].split(self._separator)
        if read_back != values:
            raise error(
                f"{values!r:.200} would be read back as {read_back!r:.200}: expected that {what} and the "
                f"marks {self._separator!r} and {self._newline!r} beside it make no other; choose another "
                "separator"
            )


class _FixedSeparatorWriter(XSVWriter):
    """Base class of formats with a fixed separator, which the index does not contain."""

    _mark = ""

    def __init__(self, *, columns: Mapping[str, str], out: Place, **settings: Any) -> None:
        super().__init__(columns=columns, separator=self._mark, out=out, **settings)

    def _describe_columns(self) -> dict[str, Any]:
        described = super()._describe_columns()
        del described["separator"]
        return described


class CSVWriter(_FixedSeparatorWriter):
    """A writer of comma-separated values; see `XSVWriter`."""

    _format = "csv"
    _mark = ","


class TSVWriter(_FixedSeparatorWriter):
    """A writer of tab-separated values; see `XSVWriter`."""

    _format = "tsv"
    _mark = "\t"
