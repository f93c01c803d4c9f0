"""Encodings of numbers and arrays with NumPy types, little-endian."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings.base import Column, Encoding, Plain, refuse, spoilt
from hocket.stream.errors import ConfigError, SampleError

_DTYPE_IDS = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32",
    33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_IDS_BY_DTYPE = {name: number for number, name in _DTYPE_IDS.items()}
_DIM_TYPES = ("<u1", "<u2", "<u4", "<u8")
_MOST_DIMS = 63
#: Below this number of values in a batch they are decoded one by one.
_FEW = 32
#: Bytes of a dim; arrays with a longer one are decoded one by one.
_MOST_WIDTH = 4

#: NumPy types of numbers and arrays.
SCALARS = tuple(_DTYPE_IDS.values())


def resolve_array(name: str, rest: str) -> Encoding:
    """Return the encoding `ndarray:<rest>`.

    Raises:
        ConfigError: `rest` is not `<dtype>` or `<dtype>:<shape>`.
    """
    dtype, _, shape_text = rest.partition(":")
    if dtype and dtype not in SCALARS:
        raise ConfigError(f"encoding `{name}` has dtype `{dtype}`: expected one of {', '.join(SCALARS)}")
    if not dtype:
        return AnyArray()
    if not shape_text:
        return TypedArray(dtype)
    try:
        shape = tuple(int(dim) for dim in shape_text.split(","))
    except ValueError:
        shape = ()
    if not 1 <= len(shape) <= _MOST_DIMS or min(shape) < 1:
        raise ConfigError(
            f"encoding `{name}` has shape `{shape_text}`: expected 1 to {_MOST_DIMS} dims of 1 or more, "
            "such as `2,3`"
        )
    return ShapedArray(dtype, shape)


class Scalar(Plain):
    """NumPy scalars of one type."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.width: int | None = self.dtype.itemsize
        limits: Any = np.finfo(self.dtype) if self.dtype.kind == "f" else np.iinfo(self.dtype)
        # Python numbers, because comparing with a float16 rounds the other side.
        kind = float if self.dtype.kind == "f" else int
        self._least, self._most = kind(limits.min), kind(limits.max)

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a number."""
        if isinstance(value, (int, float, np.number)) and self._holds(value):
            return np.array(value, dtype=self.dtype).tobytes()
        raise refuse(value, f"a number that {self.dtype.name} holds")

    def _holds(self, value: Any) -> bool:
        """Return whether a number can be stored: integers exactly, floats without becoming infinite."""
        if not math.isfinite(value):
            return self.dtype.kind == "f"
        number = value if self.dtype.kind == "f" else int(value)
        return bool(value == number and self._least <= number <= self._most)

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return all numbers as one array."""
        return np.frombuffer(data, self.dtype)


class Int(Scalar):
    """Python integers of 64 bits."""

    def __init__(self) -> None:
        super().__init__("int64")

    def item(self, column: Column, place: int) -> Any:
        """Return a Python int."""
        return int(column[place])


class ShapedArray(Plain):
    """Arrays of one type and shape, stored as their values only."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shape = shape
        self.width: int | None = math.prod(shape) * self.dtype.itemsize

    def encode(self, value: Any) -> bytes:
        """Return the bytes of an array's values."""
        array = _check_array(value, self.dtype)
        if array.shape != self.shape:
            raise SampleError(f"the array has shape {array.shape}: expected {self.shape}")
        return array.astype(self.dtype, copy=False).tobytes()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return all arrays stacked in one array."""
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape)


class TypedArray(Plain):
    """Arrays of one type, each stored with its shape.

    Arrays without values are stored too. mosaicml-streaming reads them, although its own writer refuses them.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")

    def encode(self, value: Any) -> bytes:
        """Return the bytes of an array's shape and values."""
        array = _check_array(value, self.dtype)
        return _encode_shape(array.shape) + array.astype(self.dtype, copy=False).tobytes()

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return a list of arrays."""
        if offsets is not None and len(offsets) > _FEW and (rows := _rows_of_one_dim(data, offsets)):
            size = self.dtype.itemsize
            if all(count * size == num_bytes for count, num_bytes, _ in rows):
                # This call takes a third of the time of `frombuffer`, and needs no slice.
                return [np.ndarray(count, self.dtype, data, start) for count, _, start in rows]
        return super().decode(data, offsets)

    def decode_one(self, value: memoryview) -> NDArray[Any]:
        """Return the array."""
        return _decode_shaped(value, self.dtype)


class AnyArray(Plain):
    """Arrays of any type, each stored with its type and shape; without values too, as `TypedArray`."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes of an array's type, shape and values."""
        array = _check_array(value, None)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return bytes([_IDS_BY_DTYPE[array.dtype.name]]) + _encode_shape(array.shape) + little.tobytes()

    def decode_one(self, value: memoryview) -> NDArray[Any]:
        """Return the array."""
        name = _DTYPE_IDS.get(value[0]) if len(value) else None
        if name is None:
            raise spoilt(value, "an array whose first byte is the number of a dtype")
        return _decode_shaped(value[1:], np.dtype(name).newbyteorder("<"))


def _check_array(value: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """Return a value that is an array of a dtype, or of any that can be stored if None."""
    if not isinstance(value, np.ndarray) or not 1 <= value.ndim <= _MOST_DIMS:
        raise refuse(value, f"a NumPy array with 1 to {_MOST_DIMS} dims")
    array: NDArray[Any] = _unmask(value) if isinstance(value, np.ma.MaskedArray) else value
    if dtype is None and array.dtype.name not in _IDS_BY_DTYPE:
        raise SampleError(f"the array has dtype {array.dtype.name}: expected one of {', '.join(SCALARS)}")
    # `name` is slow, and equal for both byte orders; so it comes last.
    if dtype is not None and array.dtype != dtype and array.dtype.name != dtype.name:
        raise SampleError(f"the array has dtype {array.dtype.name}: expected {dtype.name}")
    return array


def _unmask(array: np.ma.MaskedArray[Any, Any]) -> NDArray[Any]:
    """Return the values of a masked array of which none is masked."""
    num_masked = int(np.sum(np.ma.getmaskarray(array)))
    if num_masked:
        raise SampleError(
            f"the array has {num_masked} masked elements, which the encoding cannot store: expected none; "
            "fill them with `filled`, or write the mask as a column of its own"
        )
    return np.asarray(array.data)


def _encode_shape(shape: tuple[int, ...]) -> bytes:
    size_id = next(number for number in range(4) if max(shape) < 1 << (8 << number))
    return bytes([len(shape) << 2 | size_id]) + np.array(shape, _DIM_TYPES[size_id]).tobytes()


def _rows_of_one_dim(data: memoryview, offsets: NDArray[np.uint64]) -> list[tuple[int, int, int]]:
    """Return the number of values, their bytes and their start for arrays that have one dim, as tokens do.

    Returns:
        An empty list if one of the arrays has another number of dims, no values, or a head that is cut.
    """
    raw, edges = np.frombuffer(data, np.uint8), offsets.astype(np.int64)
    begins, ends = edges[:-1], edges[1:]
    if not raw.size or (ends <= begins).any():
        return []
    heads = raw[begins]
    widths = 1 << (heads & 3).astype(np.int64)
    starts = begins + 1 + widths
    if (heads >> 2 != 1).any() or (starts >= ends).any() or widths.max() > _MOST_WIDTH:
        return []
    counts = np.zeros(len(begins), np.int64)
    for place in range(int(widths.max())):
        byte = raw[np.minimum(begins + 1 + place, raw.size - 1)].astype(np.int64) << 8 * place
        counts += np.where(place < widths, byte, 0)
    return list(zip(counts.tolist(), (ends - starts).tolist(), starts.tolist(), strict=True))


def _decode_shaped(value: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    ndim, size_id = (value[0] >> 2, value[0] & 3) if len(value) else (0, 0)
    start = 1 + (ndim << size_id)
    # Python integers, so that the product of dims from a hostile file cannot overflow.
    shape = np.frombuffer(value[1:start], _DIM_TYPES[size_id]).tolist() if len(value) >= start else []
    if not shape or len(value) - start != math.prod(shape) * dtype.itemsize:
        raise spoilt(value, f"an array of {dtype.name}: {ndim} dims {shape} and as many values")
    try:
        return np.frombuffer(value[start:], dtype).reshape(shape)
    except (ValueError, OverflowError):  # dims beside one of 0 that no array can have
        raise spoilt(value, f"an array of {dtype.name}, whose dims {shape} NumPy allows") from None
