"""The interface of an encoding, and the base class of most of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import SampleError, ShardCorruptError

#: A decoded column of a batch: one array if all values have the same size, else a list of values.
Column = NDArray[Any] | list[Any]


class Encoding(Protocol):
    """The encoding of a column."""

    width: int | None
    """Bytes per value; None if values differ in size."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value.

        Raises:
            SampleError: The value does not have the encoding's type.
        """
        ...

    def store(self, value: Any) -> bytes:
        """Return the bytes of a value. A value of type `bytes` is taken to be encoded already.

        Raises:
            SampleError: The value does not have the encoding's type, or the encoding cannot read its bytes.
                The caller compares their number with `width`.
        """
        ...

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return the values of a batch; `offsets` are given if `width` is None.

        Raises:
            ShardCorruptError: The bytes cannot be decoded.
        """
        ...

    def item(self, column: Column, place: int) -> Any:
        """Return value number `place` of a decoded column."""
        ...


class Plain:
    """Base class of encodings whose values differ in size and are decoded one by one."""

    width: int | None = None

    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value."""
        raise NotImplementedError

    def store(self, value: Any) -> bytes:
        """Return the bytes of a value, or the value itself if it is bytes that can be decoded."""
        if not isinstance(value, bytes):
            return self.encode(value)
        self.check_encoded(value)
        return value

    def check_encoded(self, data: bytes) -> None:
        """Raise if bytes cannot be decoded."""
        if self.width is None:
            try:
                self.decode_one(memoryview(data))
            except ShardCorruptError:
                raise refuse_encoded(data) from None

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return a list of values."""
        return [self.decode_one(data[begin:end]) for begin, end in edges_of(offsets)]

    def decode_one(self, value: memoryview) -> Any:
        """Return one value."""
        raise NotImplementedError

    def item(self, column: Column, place: int) -> Any:
        """Return value number `place`."""
        return column[place]


def edges_of(offsets: NDArray[np.uint64] | None) -> Iterable[tuple[int, int]]:
    """Return the start and the end of each value of a column whose values differ in size."""
    if offsets is None:
        raise AssertionError("a column of values of different sizes has no offsets")
    return itertools.pairwise(offsets.tolist())


def refuse(value: object, expected: str) -> SampleError:
    """Return the error for a value of the wrong type."""
    return SampleError(f"{_excerpt(repr(value))} is a {type(value).__name__}: expected {expected}")


def refuse_encoded(data: bytes) -> SampleError:
    """Return the error for bytes in a column of another encoding, which could not be read."""
    return SampleError(
        f"{_excerpt(repr(data[:60]))} are {len(data)} bytes that the column's encoding cannot read: expected "
        "a value of its type, or bytes that are encoded already; for other bytes the encoding is `bytes`"
    )


def spoilt(value: memoryview, expected: str) -> ShardCorruptError:
    """Return the error for bytes that cannot be decoded."""
    shown = _excerpt(repr(bytes(value[:60])))
    return ShardCorruptError(
        f"a value of {len(value)} bytes, {shown}, is not {expected}; restore the shard from its source"
    )


def _excerpt(shown: str) -> str:
    return shown if len(shown) <= 60 else shown[:57] + "..."
