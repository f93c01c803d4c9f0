"""What an encoding is, and what most of them share."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import SampleError, ShardCorruptError

#: A decoded column of a batch: one array where every value has one size, else a list of values.
Column = NDArray[Any] | list[Any]


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
        """Return a batch of values out of their bytes; `offsets` are given where `width` is None.

        Raises:
            ShardCorruptError: The bytes are not of this encoding.
        """
        ...

    def item(self, column: Column, place: int) -> Any:
        """Return value `place` of a decoded column as a sample has it."""
        ...


class Plain:
    """An encoding whose values differ in size and are decoded one by one."""

    width: int | None = None

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return a list of values."""
        return [self.decode_one(value) for value in _slices(data, offsets)]

    def decode_one(self, value: memoryview) -> Any:
        """Return one value."""
        raise NotImplementedError

    def item(self, column: Column, place: int) -> Any:
        """Return value `place` as it is."""
        return column[place]


def _slices(data: memoryview, offsets: NDArray[np.uint64] | None) -> list[memoryview]:
    if offsets is None:
        raise AssertionError("a ragged column came without its offsets")
    edges = offsets.tolist()
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


def refuse(value: object, expected: str) -> SampleError:
    """Return the error for a value of another type."""
    return SampleError(f"{_excerpt(repr(value))} is a {type(value).__name__}: expected {expected}")


def spoilt(value: memoryview, expected: str) -> ShardCorruptError:
    """Return the error for bytes that are not what their column's encoding says."""
    shown = _excerpt(repr(bytes(value[:60])))
    return ShardCorruptError(
        f"a value of {len(value)} bytes, {shown}, is not {expected}; restore the shard from its source"
    )


def _excerpt(shown: str) -> str:
    return shown if len(shown) <= 60 else shown[:57] + "..."
