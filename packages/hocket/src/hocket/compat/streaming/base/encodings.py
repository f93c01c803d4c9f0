"""Encodings of a program's own: `streaming.base.format.mds.encodings`, as far as a program adds to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import Column
from hocket.stream.encodings.base import Plain
from hocket.stream.encodings.resolve import ADDED, is_encoding
from hocket.stream.errors import ConfigError

__all__ = ["Encoding"]


class Encoding(ABC):
    """The base class of an own encoding, which `_encodings["its name"] = ItsClass` adds.

    A process that reads or writes such columns adds it first; so do spawned workers.
    """

    size: int | None = None
    """Bytes per value; None if values differ in size."""

    @abstractmethod
    def encode(self, obj: Any) -> bytes:
        """Return the bytes of a value."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of its bytes."""


class _AddedEncoding(Plain):
    """An own encoding with the interface of those of `hocket.stream`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.width = given.size

    def encode(self, value: Any) -> bytes:
        return bytes(self._given.encode(value))

    def check_encoded(self, data: bytes) -> None:
        """Take any bytes as encoded already, as mosaicml-streaming does."""

    def decode(self, data: memoryview, offsets: NDArray[np.uint64] | None) -> Column:
        if self.width is None:
            return super().decode(data, offsets)
        starts = range(0, len(data), self.width)
        return [self.decode_one(data[start : start + self.width]) for start in starts]

    def decode_one(self, value: memoryview) -> Any:
        return self._given.decode(bytes(value))


class _AddedEncodings(UserDict[str, type[Encoding]]):
    """The classes of own encodings by name.

    Raises:
        ConfigError: The name is that of an encoding of the format, whose values the reader decodes itself.
    """

    def __setitem__(self, name: str, kind: type[Encoding]) -> None:
        if name not in self and is_encoding(name):
            raise ConfigError(f"`{name}` is an encoding of the format: expected another name for an own one")
        super().__setitem__(name, kind)
        ADDED[name] = lambda: _AddedEncoding(kind())

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del ADDED[name]


_encodings = _AddedEncodings()
