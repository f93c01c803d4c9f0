"""Writing JSON lines and separated values, each shard with a file of its samples' offsets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.output import Place
from hocket.stream.writer import Writer

_TYPES: dict[str, type[str | int | float]] = {"str": str, "int": int, "float": float}


class _TextWriter(Writer):
    """What the formats share: columns of three types, a newline, and two files a shard."""

    def __init__(
        self, *, columns: Mapping[str, str], out: Place, newline: str = "\n", **settings: Any
    ) -> None:
        for name, kind in columns.items():
            if kind not in _TYPES:
                raise ConfigError(f"column `{name}` has the type `{kind}`: expected one of {list(_TYPES)}")
        if not newline:
            raise ConfigError("`newline` is empty: expected what ends a sample")
        self._newline = newline
        super().__init__(columns=columns, out=out, **settings)

    def _values(self, sample: Mapping[str, Any]) -> list[Any]:
        """A sample's values, in the order of columns, each of its column's type.

        Raises:
            SampleError: One is missing, or of another type.
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
    """Refuse a text that no reader gets back: half a surrogate pair, which JSON takes and UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"column `{name}`: {value!r:.200}: {error}: expected a text that UTF-8 can hold"
        ) from None


class JSONWriter(_TextWriter):
    r"""Write samples as JSON objects, one a line, of columns `str`, `int` and `float`.

    Arguments, errors and what holds after a crash are those of `Writer`, and `newline`, which ends a sample
    (`\n` by default). NaN and infinities are refused: JSON has none.
    """

    _format = "json"

    def _describe_columns(self) -> dict[str, Any]:
        return {"columns": self._columns, "newline": self._newline}

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        values = dict(zip(self._columns, self._values(sample), strict=True))
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SampleError(f"column `{name}`: {value} is no JSON: expected a finite number")
        return (json.dumps(values, sort_keys=True) + self._newline).encode()


class XSVWriter(_TextWriter):
    r"""Write samples as values with a separator between them, of columns `str`, `int` and `float`.

    Arguments, errors and what holds after a crash are those of `Writer`, and two more. There is no quoting: a
    text that holds the separator or the newline is refused.

    Args:
        separator: What stands between two values.
        newline: What ends a sample; `\n` by default.
    """

    _format = "xsv"

    def __init__(self, *, columns: Mapping[str, str], separator: str, out: Place, **settings: Any) -> None:
        if not separator:
            raise ConfigError("`separator` is empty: expected what stands between two values")
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
                raise error(f"{what} holds {mark!r}: expected a text without it, as there is no quoting")

    def _check_split(self, values: list[str], what: str, error: type[ConfigError | SampleError]) -> None:
        """Refuse values that come apart elsewhere than they were joined: `x:` before a separator `::`."""
        line = self._separator.join(values) + self._newline
        found = line[: line.index(self._newline)].split(self._separator)
        if found != values:
            raise error(
                f"{values!r:.200} would be read back as {found!r:.200}: expected that {what} and the marks "
                f"{self._separator!r} and {self._newline!r} beside it make no other; choose another separator"
            )


class _FixedSeparatorWriter(XSVWriter):
    """A format whose separator the index need not say."""

    _mark = ""

    def __init__(self, *, columns: Mapping[str, str], out: Place, **settings: Any) -> None:
        super().__init__(columns=columns, separator=self._mark, out=out, **settings)

    def _describe_columns(self) -> dict[str, Any]:
        described = super()._describe_columns()
        del described["separator"]
        return described


class CSVWriter(_FixedSeparatorWriter):
    """Write samples as values with commas between them; `XSVWriter` says the rest."""

    _format = "csv"
    _mark = ","


class TSVWriter(_FixedSeparatorWriter):
    """Write samples as values with tabs between them; `XSVWriter` says the rest."""

    _format = "tsv"
    _mark = "\t"
