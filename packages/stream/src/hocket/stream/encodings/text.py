"""Encodings of bytes, strings, decimal numbers as text, JSON, and pickled objects."""

from __future__ import annotations

import contextlib
import json
import pickle
import pickletools
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings.base import Column, Plain, edges_of, refuse, refuse_encoded, spoilt
from hocket.stream.errors import SampleError


class Bytes(Plain):
    """Bytes, stored unchanged."""

    def encode(self, value: Any) -> bytes:
        """Return the value as bytes."""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        raise refuse(value, "bytes")

    def check_encoded(self, data: bytes) -> None:
        """Accept all bytes."""

    def decode_one(self, value: memoryview) -> bytes:
        """Return a copy."""
        return bytes(value)


class Text(Plain):
    """Strings in UTF-8."""

    def encode(self, value: Any) -> bytes:
        """Return the string in UTF-8."""
        if not isinstance(value, str):
            raise refuse(value, "str")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SampleError(f"{error}: expected a string that UTF-8 can encode") from None

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        """Return a list of strings."""
        try:
            text = str(
                data, "ascii"
            )  # where a byte is a character, slices of one string take a third of the time
        except UnicodeDecodeError:
            return super().decode(data, offsets)
        return [text[begin:end] for begin, end in edges_of(offsets)]

    def decode_one(self, value: memoryview) -> str:
        """Return the string."""
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            raise spoilt(value, "UTF-8") from None


class WrittenNumber(Plain):
    """Numbers as text, of any size and precision.

    Args:
        kind: `int`, `float` or `Decimal`.
    """

    def __init__(self, kind: type[int | float | Decimal]) -> None:
        self._kind = kind

    def encode(self, value: Any) -> bytes:
        """Return the number as text."""
        if not isinstance(value, self._kind) or isinstance(value, bool):
            raise refuse(value, self._kind.__name__)
        try:
            return str(value).encode()
        except ValueError as error:
            # Python limits the digits of an int.
            raise SampleError(str(error)) from None

    def decode_one(self, value: memoryview) -> int | float | Decimal:
        """Return the number."""
        try:
            return self._kind(str(value, "utf-8"))
        except (ValueError, InvalidOperation):
            raise spoilt(value, f"a written {self._kind.__name__}") from None


class Json(Plain):
    """JSON values; a NumPy array is stored as a list."""

    def encode(self, value: Any) -> bytes:
        """Return the value as JSON."""
        try:
            return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(f"{error}: expected a value that JSON can hold") from None

    def decode_one(self, value: memoryview) -> Any:
        """Return the JSON value."""
        try:
            return json.loads(bytes(value))
        except (ValueError, RecursionError):
            raise spoilt(value, "JSON") from None


class Pickled(Plain):
    """Pickled objects. Decoding runs code from the data, so `resolve_encoding` requires permission."""

    def encode(self, value: Any) -> bytes:
        """Return the object as a pickle."""
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise SampleError(f"{error}: expected an object that can be pickled") from None

    def check_encoded(self, data: bytes) -> None:
        """Check that bytes are one pickle, without running it."""
        end = -1
        with contextlib.suppress(ValueError, UnicodeError):
            end = max(position or 0 for _, _, position in pickletools.genops(data))
        if end + 1 != len(data):
            raise refuse_encoded(data)

    def decode_one(self, value: memoryview) -> Any:
        """Return the object."""
        try:
            return pickle.loads(value)
        except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError):
            raise spoilt(value, "a pickled object") from None
