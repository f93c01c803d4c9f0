"""A pickle writer without torch that emits the opcodes that torch's unpickler accepts.

Writes protocol 2, as `torch.save` does. It can emit only plain values and the few classes below.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PICKLE_START", "PersistentStorage", "PickledCall", "PickledGlobal", "PickledInstance", "dumps"]


PICKLE_START = b"\x80\x02"
"""The first bytes of a pickle of this module; torch writes a distributed checkpoint's by a later protocol."""


@dataclass(frozen=True, slots=True)
class PickledGlobal:
    """A name that the unpickler imports."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class PickledCall:
    """The result of calling a global with arguments."""

    function: PickledGlobal
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PickledInstance:
    """An instance that the unpickler creates without its constructor and then gives its state."""

    kind: PickledGlobal
    state: Any = None


@dataclass(frozen=True, slots=True)
class PersistentStorage:
    """An object with a persistent id: a storage."""

    id: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """Return a value as a pickle.

    Args:
        value: None, bool, int, float, str, bytes, tuple, list, mappings, and the classes of this module.

    Raises:
        TypeError: The value has another type.
    """
    writer = _Writer()
    writer.write(value)
    return PICKLE_START + bytes(writer.out) + b"."


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        # Only texts and names are memoised, because they repeat; everything else is written in full.
        self._memo: dict[str | PickledGlobal, int] = {}

    def write(self, value: Any) -> None:
        if value is None:
            self.out += b"N"
        elif value is True or value is False:
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._write_int(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self._write_text(value)
        elif isinstance(value, bytes):
            self.write(PickledCall(PickledGlobal("_codecs", "encode"), (value.decode("latin1"), "latin1")))
        elif isinstance(value, tuple):
            self._write_items(b"(", value, b"t")
        elif isinstance(value, list):
            self._write_items(b"](", value, b"e")
        elif isinstance(value, Mapping):
            self._write_items(b"}(", [part for pair in value.items() for part in pair], b"u")
        else:
            self._write_object(value)

    def _write_items(self, begin: bytes, items: list[Any] | tuple[Any, ...], end: bytes) -> None:
        self.out += begin
        for item in items:
            self.write(item)
        self.out += end

    def _write_int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + struct.pack("<B", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            # LONG1 holds up to 255 bytes, LONG4 any number.
            size = len(data)
            self.out += b"\x8a" + struct.pack("<B", size) if size < 256 else b"\x8b" + struct.pack("<i", size)
            self.out += data

    def _write_text(self, value: str) -> None:
        if not self._recall(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._remember(value)

    def _write_object(self, value: object) -> None:
        if isinstance(value, PickledGlobal):
            if not self._recall(value):
                self.out += f"c{value.module}\n{value.name}\n".encode()
                self._remember(value)
        elif isinstance(value, PickledCall):
            self.write(value.function)
            self.write(value.arguments)
            self.out += b"R"
        elif isinstance(value, PickledInstance):
            self.write(value.kind)
            self.out += b")\x81"
            if value.state is not None:
                self.write(value.state)
                self.out += b"b"
        elif isinstance(value, PersistentStorage):
            self.write(value.id)
            self.out += b"Q"
        else:
            raise TypeError(
                f"a `{type(value).__qualname__}` cannot be written: the pickle writer does not know this type"
            )

    def _recall(self, value: str | PickledGlobal) -> bool:
        number = self._memo.get(value)
        if number is None:
            return False
        self.out += b"j" + struct.pack("<I", number)
        return True

    def _remember(self, value: str | PickledGlobal) -> None:
        self._memo[value] = len(self._memo)
        self.out += b"r" + struct.pack("<I", self._memo[value])
