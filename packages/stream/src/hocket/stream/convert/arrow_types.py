"""Types of Arrow columns: numbers, arrays, files, and what JSON cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hocket.stream.convert.sample_writer import require
from hocket.stream.encodings.arrays import SCALARS

_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_UUID = "arrow.uuid"


def plain_type(kind: Any) -> Any:
    """Return the type of the values of a dictionary, of runs, or of an extension type that is no array."""
    types = require("pyarrow", "pyarrow").types
    while True:
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif is_extension(kind) and tensor_shape(kind) is None and not is_uuid(kind):
            kind = kind.storage_type
        else:
            return kind


def plain_column(column: Any) -> Any:
    """Return a column with the values of another one and its `plain_type`."""
    arrow = require("pyarrow", "pyarrow")
    while True:
        if arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif arrow.types.is_run_end_encoded(column.type):
            column = require("pyarrow.compute", "pyarrow").run_end_decode(column)
        elif plain_type(column.type) != column.type:
            column = column.storage
        else:
            return column


def is_extension(kind: Any) -> bool:
    """Return whether a type is an extension type, such as `datasets.Array2D`."""
    return isinstance(kind, require("pyarrow", "pyarrow").BaseExtensionType)


def is_uuid(kind: Any) -> bool:
    """Return whether a type is Arrow's UUID."""
    return is_extension(kind) and kind.extension_name == _UUID


def is_binary(kind: Any) -> bool:
    """Return whether values of a type are bytes."""
    types = require("pyarrow", "pyarrow").types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_string(kind: Any) -> bool:
    """Return whether values of a type are strings."""
    types = require("pyarrow", "pyarrow").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_time(kind: Any) -> bool:
    """Return whether values of a type are dates, times of day, or timestamps."""
    types = require("pyarrow", "pyarrow").types
    return bool(types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind))


def is_list(kind: Any) -> bool:
    """Return whether values of a type are lists of any kind."""
    types = require("pyarrow", "pyarrow").types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def is_file(kind: Any) -> bool:
    """Return whether values are files as `datasets` stores them: `struct<bytes, path>`, in any order."""
    if not require("pyarrow", "pyarrow").types.is_struct(kind) or kind.num_fields != 2:
        return False
    fields = {field.name: field.type for field in kind}
    return set(fields) == {"bytes", "path"} and is_binary(fields["bytes"])


def number(kind: Any) -> str | None:
    """Return the NumPy name of a type of numbers; None for other types."""
    name = _ARROW_NAMES.get(str(kind), str(kind))
    return name if name in SCALARS else None


def tensor_shape(kind: Any) -> tuple[int | None, ...] | None:
    """Return the shape of an array type, such as `datasets.Array2D`; None for other types.

    A dim is None if it differs between rows, which only the first may.
    """
    shape = getattr(kind, "shape", None) if is_extension(kind) else None
    return None if shape is None else tuple(shape)


def element(kind: Any) -> Any:
    """Return the type of the values of a list or of an array type; None for other types."""
    if tensor_shape(kind) is not None:
        kind = kind.storage_type
        while is_list(kind):
            kind = kind.value_type
        return kind
    return kind.value_type if is_list(kind) else None


def array_shape(kind: Any) -> tuple[int, ...] | None:
    """Return the shape that all arrays of a type have in memory; None if it differs between rows."""
    shape = tensor_shape(kind)
    if shape is None and require("pyarrow", "pyarrow").types.is_fixed_size_list(kind) and kind.list_size:
        shape = (kind.list_size,)
    if shape is None or None in shape:
        return None
    return tuple(dim for dim in shape if dim is not None)


def axes(kind: Any) -> list[int] | None:
    """Return the order of the dims in memory that gives an array's own dims; None if they are the same."""
    permutation = getattr(kind, "permutation", None) if is_extension(kind) else None
    return None if permutation is None else list(permutation)


def inner_shape(kind: Any) -> tuple[int, ...]:
    """Return the dims after the first of arrays whose first dim differs between rows."""
    return tuple(dim for dim in (tensor_shape(kind) or ())[1:] if dim is not None)


def leaves(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the type of each value within a type of structs, lists and maps."""
    types = require("pyarrow", "pyarrow").types
    kind = plain_type(kind)
    if types.is_struct(kind):
        for field in kind:
            yield from leaves(field.type, f"{path}.{field.name}")
    elif types.is_map(kind):
        yield from leaves(kind.key_type, f"{path}.key")
        yield from leaves(kind.item_type, f"{path}.value")
    elif is_list(kind):
        yield from leaves(kind.value_type, path)
    else:
        yield path, kind


def needs_text(kind: Any) -> bool:
    """Return whether a type has values that JSON holds only as text, or arrays that are more than lists."""
    types = require("pyarrow", "pyarrow").types
    return any(
        is_time(leaf)
        or is_uuid(leaf)
        or is_binary(leaf)
        or types.is_decimal(leaf)
        or types.is_float16(leaf)
        or tensor_shape(leaf) is not None
        for _, leaf in leaves(kind, "")
    )
