"""How one column's values become bytes and a batch of them values again.

A column's encoding is its string in the index: `bytes`, `str`, `int`, a NumPy scalar type such as `uint16`,
or `ndarray`, `ndarray:<dtype>`, `ndarray:<dtype>:<shape>`. All numbers are little-endian.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError, IndexCorruptError, SampleError, ShardCorruptError

#: A decoded column of a batch: one array where every value has one size, else a list of values.
Column = NDArray[Any] | list[Any]

_DTYPE_IDS = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32",
    33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SCALARS = tuple(_DTYPE_IDS.values())
_IDS_BY_DTYPE = {name: number for number, name in _DTYPE_IDS.items()}
_DIM_TYPES = ("<u1", "<u2", "<u4", "<u8")
_SUPPORTED = "`bytes`, `str`, `int`, `ndarray`, `ndarray:<dtype>`, `ndarray:<dtype>:<shape>`, " + ", ".join(
    f"`{name}`" for name in _SCALARS
)


class Encoding(Protocol):
    """One column's way to bytes and back."""

    width: int | None
    """Bytes of every value, or None where they differ."""

    def encode(self, value: Any) -> bytes:
        """Return the value's bytes.

        Raises:
            SampleError: The value is not of this encoding's type.
        """
        ...

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return a batch of values out of their bytes; `offsets` are given where `width` is None."""
        ...

    def item(self, column: Column, place: int) -> Any:
        """Return value `place` of a decoded column as a sample has it."""
        ...


def resolve_encoding(name: str, *, allow_unsafe_types: bool = False) -> Encoding:
    """Return the encoding that an index calls `name`.

    Raises:
        ConfigError: It is unknown, not supported, or unsafe and not allowed.
    """
    if name == "bytes":
        return _Bytes()
    if name == "str":
        return _Text()
    if name == "int":
        return _Int()
    if name in _SCALARS:
        return _Scalar(name)
    kind, _, rest = name.partition(":")
    if kind == "ndarray":
        return _resolve_array(name, rest)
    if kind == "pkl" and not allow_unsafe_types:
        raise ConfigError(
            "encoding `pkl` runs code out of the data when it is read: expected a plain encoding; "
            "give `allow_unsafe_types=True` only for data of your own"
        )
    raise ConfigError(f"encoding `{name}` is not supported: expected one of {_SUPPORTED}")


def _resolve_array(name: str, rest: str) -> Encoding:
    dtype, _, shape_text = rest.partition(":")
    if dtype and dtype not in _SCALARS:
        raise ConfigError(f"encoding `{name}` has dtype `{dtype}`: expected one of {', '.join(_SCALARS)}")
    if not dtype:
        return _AnyArray()
    if not shape_text:
        return _TypedArray(dtype)
    try:
        shape = tuple(int(dim) for dim in shape_text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"encoding `{name}` has shape `{shape_text}`: expected dims of 1 or more, such as `2,3`"
        )
    return _ShapedArray(dtype, shape)


def check_width(name: str, encoding: Encoding, width: int | None, origin: str) -> None:
    """Refuse an index whose size of a column is not its encoding's.

    Raises:
        IndexCorruptError: They differ.
    """
    if encoding.width != width:
        raise IndexCorruptError(
            f"the index `{origin}` is not valid: column `{name}` has `column_sizes` {width}, "
            f"expected {encoding.width}"
        )


def encode_sample(columns: Sequence[tuple[str, Encoding]], sample: dict[str, Any]) -> bytes:
    """Return a sample's bytes: the sizes of its variable columns, then all columns in their order.

    Raises:
        SampleError: A column is missing, or a value is not of its column's type.
    """
    sizes: list[int] = []
    values: list[bytes] = []
    for name, encoding in columns:
        if name not in sample:
            raise SampleError(
                f"the sample has no `{name}`: expected all of {[known for known, _ in columns]}"
            )
        value = sample[name]
        try:
            # Bytes go in as they are, whatever the encoding: whoever has them encoded has done the work.
            encoded = value if isinstance(value, bytes) else encoding.encode(value)
        except SampleError as error:
            raise SampleError(f"column `{name}`: {error}") from None
        if encoding.width is None:
            sizes.append(len(encoded))
        elif len(encoded) != encoding.width:
            raise SampleError(f"column `{name}` has {len(encoded)} bytes: expected {encoding.width}")
        values.append(encoded)
    return np.array(sizes, "<u4").tobytes() + b"".join(values)


def _refuse(value: object, expected: str) -> SampleError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return SampleError(f"{shown} is a {type(value).__name__}: expected {expected}")


def _slices(data: memoryview, offsets: NDArray[np.uint64] | None) -> list[memoryview]:
    if offsets is None:
        raise AssertionError("a ragged column came without its offsets")
    edges = offsets.tolist()
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


class _Plain:
    """What most encodings share: values of their own sizes, and items as the column has them."""

    width: int | None = None

    def item(self, column: Column, place: int) -> Any:
        return column[place]


class _Bytes(_Plain):
    def encode(self, value: Any) -> bytes:
        if isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        raise _refuse(value, "bytes")

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return [bytes(value) for value in _slices(data, offsets)]


class _Text(_Plain):
    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise _refuse(value, "str")
        return value.encode()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return [str(value, "utf-8") for value in _slices(data, offsets)]


class _Scalar(_Plain):
    """A NumPy number of one type."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.width: int | None = self.dtype.itemsize

    def encode(self, value: Any) -> bytes:
        if isinstance(value, (int, float, np.number)) and self._holds(value):
            return np.array(value, dtype=self.dtype).tobytes()
        raise _refuse(value, f"a number that {self.dtype.name} holds")

    def _holds(self, value: Any) -> bool:
        """Integers must come back as they are; floats may lose digits, but not become infinite."""
        if self.dtype.kind == "f":
            return not math.isfinite(value) or abs(value) <= float(np.finfo(self.dtype).max)
        limits = np.iinfo(self.dtype)
        return math.isfinite(value) and value == int(value) and limits.min <= int(value) <= limits.max

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return np.frombuffer(data, self.dtype)


class _Int(_Scalar):
    """A Python int in 64 bits."""

    def __init__(self) -> None:
        super().__init__("int64")

    def item(self, column: Column, place: int) -> Any:
        return int(column[place])


class _ShapedArray(_Plain):
    """Arrays of one type and shape: their values and nothing else."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shape = shape
        self.width: int | None = math.prod(shape) * self.dtype.itemsize

    def encode(self, value: Any) -> bytes:
        array = _check_array(value, self.dtype)
        if array.shape != self.shape:
            raise SampleError(f"the array has shape {array.shape}: expected {self.shape}")
        return array.astype(self.dtype, copy=False).tobytes()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape)


class _TypedArray(_Plain):
    """Arrays of one type, each with its shape before its values."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")

    def encode(self, value: Any) -> bytes:
        array = _check_array(value, self.dtype)
        return _encode_shape(array.shape) + array.astype(self.dtype, copy=False).tobytes()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return [_decode_shaped(value, self.dtype) for value in _slices(data, offsets)]


class _AnyArray(_Plain):
    """Arrays that each say their type and shape."""

    def encode(self, value: Any) -> bytes:
        array = _check_array(value, None)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return bytes([_IDS_BY_DTYPE[array.dtype.name]]) + _encode_shape(array.shape) + little.tobytes()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        return [_decode_typed(value) for value in _slices(data, offsets)]


def _check_array(value: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.ndim == 0 or value.size == 0:
        raise _refuse(value, "a NumPy array with at least one dim and no dim of 0")
    if dtype is None and value.dtype.name not in _IDS_BY_DTYPE:
        raise SampleError(f"the array has dtype {value.dtype.name}: expected one of {', '.join(_SCALARS)}")
    if dtype is not None and value.dtype.name != dtype.name:
        raise SampleError(f"the array has dtype {value.dtype.name}: expected {dtype.name}")
    return value


def _encode_shape(shape: tuple[int, ...]) -> bytes:
    size_id = next(number for number in range(4) if max(shape) < 1 << (8 << number))
    return bytes([len(shape) << 2 | size_id]) + np.array(shape, _DIM_TYPES[size_id]).tobytes()


def _decode_shaped(value: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(value) < 1:
        raise ShardCorruptError("an array of 0 bytes: expected at least its number of dims")
    ndim, size_id = value[0] >> 2, value[0] & 3
    start = 1 + (ndim << size_id)
    # Python integers: dims out of a hostile file must not wrap around on their way to the product.
    shape = (
        [int(dim) for dim in np.frombuffer(value[1:start][: (ndim << size_id)], _DIM_TYPES[size_id])]
        if (len(value) >= start)
        else []
    )
    if not shape or len(value) - start != math.prod(shape) * dtype.itemsize:
        raise ShardCorruptError(
            f"an array of {len(value)} bytes says {ndim} dims {shape} of {dtype.name}: "
            "expected as many bytes as those have; restore the shard from its source"
        )
    return np.frombuffer(value[start:], dtype).reshape(shape)


def _decode_typed(value: memoryview) -> NDArray[Any]:
    name = _DTYPE_IDS.get(value[0]) if len(value) else None
    if name is None:
        found = value[0] if len(value) else "nothing"
        raise ShardCorruptError(f"an array begins with {found}: expected the number of a dtype")
    return _decode_shaped(value[1:], np.dtype(name).newbyteorder("<"))
