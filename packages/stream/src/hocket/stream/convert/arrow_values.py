"""Values of Arrow columns as samples hold them. No value passes through pandas, and times keep all digits."""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import math
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hocket.stream.convert import arrow_types as kinds
from hocket.stream.convert.sample_writer import require
from hocket.stream.errors import SampleError

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UTC_NAMES = ("UTC", "Etc/UTC", "Z", "+00:00")
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MS_PER_DAY = 86_400_000


def column_values(column: Any, encoding: str) -> list[Any]:
    """Return the values of a column for an encoding.

    Lists of numbers are arrays, times and UUIDs strings, and files their bytes. For `json`, the values within
    structs and lists are such that JSON holds them.
    """
    column = kinds.plain_column(column)
    items = numbers(column)
    if items is not None and not column.null_count and not items.null_count:
        return _arrays(column, items.to_numpy(zero_copy_only=False))
    if encoding not in ("json", "pkl"):
        if kinds.is_file(column.type):
            return _file_bytes(column)
        if kinds.is_list(column.type) and kinds.is_file(column.type.value_type):
            return _split(column, _file_bytes(column.flatten()))
    if kinds.is_binary(column.type) or (kinds.is_uuid(column.type) and encoding == "bytes"):
        return _listed(getattr(column, "storage", column))
    if encoding != "json" and not kinds.is_time(column.type) and not kinds.is_uuid(column.type):
        return _listed(column)
    return json_values(column)


def batch_samples(batch: Any, encodings: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as samples, for the encodings of their columns."""
    names = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    for values in zip(*(column_values(column, encodings[name]) for name, column in columns), strict=True):
        yield dict(zip(names, values, strict=True))


def json_values(column: Any) -> list[Any]:
    """Return the values of a column as JSON holds them.

    Times and UUIDs are strings, decimals their text, binary is in Base64, maps are lists of pairs.
    """
    types = require("pyarrow", "pyarrow").types
    column = kinds.plain_column(column)
    kind = column.type
    if not kinds.needs_text(kind):
        return _listed(column)
    if kinds.is_time(kind):
        return iso_times(column)
    if types.is_decimal(kind):
        return [None if value is None else str(value) for value in _listed(column)]
    if kinds.is_uuid(kind):
        return [None if value is None else str(uuid.UUID(bytes=value)) for value in _listed(column.storage)]
    if kinds.is_binary(kind):
        return [None if value is None else base64.b64encode(value).decode() for value in _listed(column)]
    if types.is_struct(kind):
        fields = [json_values(field) for field in column.flatten()]
        rows = zip(*fields, strict=True) if fields else itertools.repeat(())
        names = [field.name for field in kind]
        return [
            dict(zip(names, row, strict=True)) if is_valid else None
            for row, is_valid in zip(rows, column.is_valid().to_pylist(), strict=bool(fields))
        ]
    if types.is_map(kind):
        arrow = require("pyarrow", "pyarrow")
        pair = arrow.struct([("key", kind.key_type), ("value", kind.item_type)])
        pairs = json_values(column.cast(arrow.list_(pair)))
        return [None if row is None else [list(item.values()) for item in row] for row in pairs]
    if kinds.tensor_shape(kind) is not None:
        return _tensor_lists(column)
    if kinds.is_list(kind):
        return _split(column, json_values(column.flatten()))
    return _listed(column.cast("float32") if types.is_float16(kind) else column)


def numbers(column: Any) -> Any:
    """Return all numbers of a column of lists or arrays as one array; None for other columns."""
    if kinds.number(kinds.element(column.type)) is None:
        return None
    column = getattr(column, "storage", column)
    while kinds.is_list(column.type):
        column = column.flatten()
    return column


def lengths(column: Any) -> list[int]:
    """Return the length of each list; 0 for null."""
    found = require("pyarrow.compute", "pyarrow").list_value_length(getattr(column, "storage", column))
    return [length or 0 for length in found.to_pylist()]


def iso_times(column: Any) -> list[str | None]:
    """Return dates, times of day and timestamps in ISO 8601, with 6 or 9 digits of a second if not whole."""
    arrow = require("pyarrow", "pyarrow")
    kind = column.type
    narrow = arrow.types.is_date32(kind) or arrow.types.is_time32(kind)
    counts = (column.cast(arrow.int32()) if narrow else column).cast(arrow.int64())
    ints = require("pyarrow.compute", "pyarrow").fill_null(counts, 0).to_numpy(zero_copy_only=False)
    if arrow.types.is_date(kind):
        days = ints if narrow else ints // _MS_PER_DAY
        texts = np.datetime_as_string(days.astype("datetime64[D]")).tolist()
    elif arrow.types.is_time(kind):
        texts = _times_of_day(ints, kind)
    else:
        texts = [_short(text) for text in np.datetime_as_string(ints.astype(f"datetime64[{kind.unit}]"))]
        if kind.tz in _UTC_NAMES:
            texts = [f"{text}+00:00" for text in texts]
        elif kind.tz is not None:
            texts = _in_zone(ints, texts, kind)
    if not column.null_count:
        return list(texts)
    valid = column.is_valid().to_pylist()
    return [text if is_valid else None for text, is_valid in zip(texts, valid, strict=True)]


def _times_of_day(ints: Any, kind: Any) -> list[str]:
    if ints.size and (ints.min() < 0 or ints.max() >= 86_400 * _PER_SECOND[kind.unit]):
        raise SampleError(f"a value of type {kind} is not a time of day: expected less than 24 hours")
    days = np.datetime_as_string(ints.astype(f"datetime64[{kind.unit}]")).tolist()
    return [_short(text.partition("T")[2]) for text in days]


def _short(text: str) -> str:
    """Return a time with 6 digits of a second, as Python writes it; with 9 if needed, with none if 0."""
    whole, _, digits = text.partition(".")
    if not digits.strip("0"):
        return whole
    return f"{whole}.{digits[:6].ljust(6, '0')}" if not digits[6:].strip("0") else text


def _in_zone(ints: Any, texts: list[str], kind: Any) -> list[str]:
    """Return timestamps in their time zone, from those in UTC."""
    zone = require("pyarrow", "pyarrow").lib.string_to_tzinfo(kind.tz)
    local: list[str] = []
    for count, text in zip((ints // _PER_SECOND[kind.unit]).tolist(), texts, strict=True):
        try:
            moment = (_EPOCH + dt.timedelta(seconds=count)).astimezone(zone).isoformat()
        except (OverflowError, ValueError):
            raise SampleError(
                f"the time {text} in UTC has no known local time in `{kind.tz}`: expected years 1 to 9999; "
                "cast the column to a timestamp in UTC"
            ) from None
        _, dot, digits = text.partition(".")
        local.append(f"{moment[:19]}{dot}{digits}{moment[19:]}")
    return local


def _arrays(column: Any, items: Any) -> list[Any]:
    shape = kinds.array_shape(column.type)
    if shape is not None:
        if items.size != len(column) * math.prod(shape):
            raise SampleError(f"arrays of {column.type} have other shapes: expected {shape} in every row")
        arrays = items.reshape(len(column), *shape)
        axes = kinds.axes(column.type)
        return list(arrays if axes is None else arrays.transpose(0, *(1 + axis for axis in axes)))
    inner = kinds.inner_shape(column.type)
    ends = (np.cumsum(lengths(column)) * math.prod(inner)).tolist()
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return [items[begin:end].reshape(-1, *inner) if inner else items[begin:end] for begin, end in parts]


def _tensor_lists(column: Any) -> list[Any]:
    """Return arrays as nested lists, for a column with nulls."""
    arrow = require("pyarrow", "pyarrow")
    present = arrow.ExtensionArray.from_storage(column.type, column.storage.drop_null())
    items = numbers(present)
    if items is None or items.null_count:
        raise SampleError(f"an array of {column.type} has null elements: expected numbers; fill them")
    rest = (array.tolist() for array in _arrays(present, items.to_numpy(zero_copy_only=False)))
    return [next(rest) if is_valid else None for is_valid in column.is_valid().to_pylist()]


def _split(column: Any, items: list[Any]) -> list[Any]:
    """Return each row's part of the values of a column of lists."""
    rest = iter(items)
    valid = column.is_valid().to_pylist()
    return [
        list(itertools.islice(rest, length)) if is_valid else None
        for length, is_valid in zip(lengths(column), valid, strict=True)
    ]


def _file_bytes(column: Any) -> list[Any]:
    return _listed(column.flatten()[column.type.get_field_index("bytes")])


def _listed(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values
