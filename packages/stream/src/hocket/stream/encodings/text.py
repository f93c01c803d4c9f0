"""Bytes, texts, numbers written out, JSON, and pickled objects."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from hocket.stream.encodings.base import Plain, refuse, spoilt
from hocket.stream.errors import SampleError


class Bytes(Plain):
    """Bytes as they are."""

    def encode(self, value: Any) -> bytes:
        """Return the value itself."""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        raise refuse(value, "bytes")

    def decode_one(self, value: memoryview) -> bytes:
        """Return a copy."""
        return bytes(value)


class Text(Plain):
    """A text in UTF-8."""

    def encode(self, value: Any) -> bytes:
        """Return its UTF-8."""
        if not isinstance(value, str):
            raise refuse(value, "str")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SampleError(f"{error}: expected a text that UTF-8 can hold") from None

    def decode_one(self, value: memoryview) -> str:
        """Return the text."""
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            raise spoilt(value, "UTF-8") from None


class WrittenNumber(Plain):
    """A number as `str` writes it: of any size and precision.

    Args:
        kind: `int`, `float` or `Decimal`.
    """

    def __init__(self, kind: type[int | float | Decimal]) -> None:
        self._kind = kind

    def encode(self, value: Any) -> bytes:
        """Return the number's digits."""
        if not isinstance(value, self._kind) or isinstance(value, bool):
            raise refuse(value, self._kind.__name__)
        try:
            return str(value).encode()
        except ValueError as error:
            # Python's own limit on the digits of an int.
            raise SampleError(str(error)) from None

    def decode_one(self, value: memoryview) -> int | float | Decimal:
        """Return the number."""
        try:
            return self._kind(str(value, "utf-8"))
        except (ValueError, InvalidOperation):
            raise spoilt(value, f"a written {self._kind.__name__}") from None


class Json(Plain):
    """Whatever JSON can say; a NumPy array becomes a list."""

    def encode(self, value: Any) -> bytes:
        """Return its JSON."""
        try:
            return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(f"{error}: expected what JSON can say") from None

    def decode_one(self, value: memoryview) -> Any:
        """Return what the JSON says."""
        try:
            return json.loads(bytes(value))
        except (ValueError, RecursionError):
            raise spoilt(value, "JSON") from None


class Pickled(Plain):
    """Any object at all. Decoding runs code out of the data: `resolve_encoding` asks for consent."""

    def encode(self, value: Any) -> bytes:
        """Return its pickle."""
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise SampleError(f"{error}: expected an object that can be pickled") from None

    def decode_one(self, value: memoryview) -> Any:
        """Return the object."""
        try:
            return pickle.loads(value)
        except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError):
            raise spoilt(value, "a pickled object") from None
