"""Columns of Arrow data: their encodings, inferred from types and values, and their values as samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from hocket.stream.convert.sample_writer import require
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError, SampleError

logger = logging.getLogger("hocket.stream")

_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def infer_columns(
    batches: Iterator[Any], *, images: Collection[str], given: Collection[str]
) -> dict[str, str]:
    """Return the encoding of each column of record batches that share a schema.

    Logs a warning for each column of arrays in which some rows are empty, and for each column that becomes
    `json` only because some values are null.

    Args:
        batches: The record batches of a source.
        images: Names of columns that hold image files.
        given: Names of columns whose encoding the caller gives; they are `given` in the result.

    Raises:
        ConfigError: The schemas differ, or no encoding holds a column.
    """
    types: dict[str, Any] = {}
    nulls: set[str] = set()
    num_empty: dict[str, int] = {}
    not_png: set[str] = set()
    for batch in batches:
        batch_types = dict(zip(batch.schema.names, batch.schema.types, strict=True))
        if len(batch_types) != batch.num_columns or (types and batch_types != types):
            raise ConfigError(
                f"the columns are {batch.schema}: expected each name once, the same in all files"
            )
        types = batch_types
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            numbers = _numbers(column)
            if column.null_count or (numbers is not None and numbers.null_count):
                nulls.add(name)
            elif numbers is not None and _array_shape(column.type) is None:
                num_empty[name] = num_empty.get(name, 0) + _lengths(column).count(0)
            if name in images and name not in not_png:
                heads = (value.as_py() for value in column if value.is_valid)
                if not all(head[:4] == b"\x89PNG" for head in heads):
                    not_png.add(name)
    columns: dict[str, str] = {}
    for name, kind in types.items():
        if name in images:
            columns[name] = _image_encoding(name, is_png=name not in not_png, has_nulls=name in nulls)
        elif name in given:
            columns[name] = "given"
        else:
            columns[name] = _encoding(name, kind, has_nulls=name in nulls)
            _warn(name, columns[name], kind, num_empty.get(name, 0))
    return columns


def column_values(column: Any) -> list[Any]:
    """Return the values of a column, with lists of numbers as arrays and times as strings."""
    types = require("pyarrow", "pyarrow").types
    numbers = _numbers(column)
    if numbers is not None and not column.null_count and not numbers.null_count:
        items = numbers.to_numpy(zero_copy_only=False)
        shape = _array_shape(column.type)
        if shape is not None:
            if items.size != len(column) * math.prod(shape):
                raise SampleError(f"arrays of {column.type} have other shapes: expected {shape} in every row")
            return list(items.reshape(len(column), *shape))
        inner = _inner_shape(column.type)
        ends = (np.cumsum(_lengths(column)) * math.prod(inner)).tolist()
        parts = zip([0, *ends[:-1]], ends, strict=True)
        return [items[begin:end].reshape(-1, *inner) if inner else items[begin:end] for begin, end in parts]
    column = getattr(column, "storage", column)
    values: list[Any] = column.to_pylist()
    if types.is_temporal(column.type) and not types.is_duration(column.type):
        return [None if value is None else value.isoformat() for value in values]
    return values


def _warn(name: str, encoding: str, kind: Any, num_empty: int) -> None:
    """Log that a column of arrays has empty rows, or that it does not become one because of nulls."""
    if encoding.startswith("ndarray") and num_empty:
        logger.warning(
            "column `%s` has %d empty lists, which become arrays of length 0 beside those of `%s`; give its "
            "encoding as `json` for lists",
            name,
            num_empty,
            encoding,
        )
    if encoding == "json" and (without_nulls := _encoding(name, kind, has_nulls=False)) != "json":
        logger.warning(
            "column `%s` has nulls and becomes `json`; fill or drop them, and it becomes `%s`",
            name,
            without_nulls,
        )


def _image_encoding(name: str, *, is_png: bool, has_nulls: bool) -> str:
    if has_nulls:
        raise ConfigError(
            f"column `{name}` has images without bytes: expected them in the data, not as paths"
        )
    return "png" if is_png else "jpeg"


def _encoding(name: str, kind: Any, *, has_nulls: bool) -> str:
    types = require("pyarrow", "pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_duration(kind) or types.is_map(kind) or types.is_interval(kind):
        raise ConfigError(
            f"column `{name}` is of type {kind}, which no encoding supports: cast it, or drop it"
        )
    is_binary = (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )
    if is_binary or types.is_decimal(kind):
        if has_nulls:
            raise ConfigError(
                f"column `{name}` is of type {kind} and has nulls: expected a value in every row"
            )
        return "bytes" if is_binary else "str_decimal"
    if has_nulls:
        return "json"
    is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if is_string or types.is_temporal(kind):
        return "str"
    if (number := _number(kind)) is not None:
        return number
    if (number := _number(_element(kind))) is not None:
        shape = _array_shape(kind)
        return f"ndarray:{number}" + (":" + ",".join(map(str, shape)) if shape else "")
    return "json"


def _number(kind: Any) -> str | None:
    name = _ARROW_NAMES.get(str(kind), str(kind))
    return name if name in SCALARS else None


def _is_list(kind: Any) -> bool:
    types = require("pyarrow", "pyarrow").types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _tensor_shape(kind: Any) -> tuple[int | None, ...] | None:
    """Return the shape of an array type, such as `datasets.Array2D`; None for other types.

    A dim is None if it differs between rows, which only the first may.
    """
    is_tensor = isinstance(kind, require("pyarrow", "pyarrow").BaseExtensionType)
    shape = getattr(kind, "shape", None) if is_tensor else None
    return None if shape is None else tuple(shape)


def _element(kind: Any) -> Any:
    """Return the type of the values of a list or of an array type; None for other types."""
    if _tensor_shape(kind) is not None:
        kind = kind.storage_type
        while _is_list(kind):
            kind = kind.value_type
        return kind
    return kind.value_type if _is_list(kind) else None


def _array_shape(kind: Any) -> tuple[int, ...] | None:
    """Return the shape that all arrays of a type have; None if it differs between rows."""
    types = require("pyarrow", "pyarrow").types
    shape = _tensor_shape(kind)
    if shape is None and types.is_fixed_size_list(kind) and kind.list_size:
        shape = (kind.list_size,)
    if shape is None or None in shape:
        return None
    return tuple(dim for dim in shape if dim is not None)


def _inner_shape(kind: Any) -> tuple[int, ...]:
    """Return the dims after the first of arrays whose first dim differs between rows."""
    return tuple(dim for dim in (_tensor_shape(kind) or ())[1:] if dim is not None)


def _numbers(column: Any) -> Any:
    """Return all numbers of a column of lists or arrays as one array; None for other columns."""
    if _number(_element(column.type)) is None:
        return None
    column = getattr(column, "storage", column)
    while _is_list(column.type):
        column = column.flatten()
    return column


def _lengths(column: Any) -> list[int]:
    """Return the length of each list; 0 for null."""
    lengths = require("pyarrow.compute", "pyarrow").list_value_length(getattr(column, "storage", column))
    return [length or 0 for length in lengths.to_pylist()]
