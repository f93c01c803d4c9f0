"""An output file as a sequence of parts whose sizes are known before anything is written."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.document.file_names import Compression
from hocket.ckpt.document.records import PathItem

__all__ = ["ZIP_START", "ComputedPart", "ConvertedTensor", "OutFile", "Part", "TensorPayload", "ZipBuilder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedTensor:
    """A tensor to convert: its source name, and its name and dtype in the destination."""

    source: str
    """Its name in the source."""
    name: str
    """Its name in the destination."""
    path: tuple[PathItem, ...]
    dtype: str
    """The safetensors name of its dtype in the destination."""
    shape: tuple[int, ...]
    same_as: str | None = None
    """The destination's tensor whose storage it shares."""
    expanded_to: tuple[int, ...] | None = None
    """The shape that dims of size 1 are expanded to by a stride of 0; None if every item is stored."""
    num_bytes: int = field(init=False)
    """The number of bytes in the destination."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", math.prod(self.shape) * ITEM_BYTES[self.dtype])


@dataclass(slots=True, eq=False)
class TensorPayload:
    """A tensor's bytes in little-endian C order; CRC-32 and counts are stored once they are written."""

    tensor: ConvertedTensor
    start: tuple[int, ...] | None = None
    """Offsets of a box in the source's tensor; None for the whole tensor."""
    crc: int = 0
    num_beyond: int = 0
    """The number of items that were beyond the range of the dtype that they were cast to."""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedPart:
    """A part that is computed from the parts written before it."""

    num_bytes: int
    make: Callable[[], bytes]


Part = bytes | TensorPayload | ComputedPart


class OutFile:
    """A file of the destination.

    Attributes:
        path: Its path in the destination.
        compression: The encoding of header and blocks, if they are also compressed.
        sources: The names of the source's tensors that may be in the file.
    """

    def __init__(
        self,
        *,
        path: str,
        parts: Sequence[Part] = (),
        data_start: int | None = None,
        compression: Compression | None = None,
        make: Callable[[], Sequence[Part]] | None = None,
        sources: Iterable[str] = (),
    ) -> None:
        """Describe a file.

        Args:
            path: Its path in the destination.
            parts: Its contents, in order.
            data_start: Size of the header in bytes, if header and blocks are hashed.
            compression: The encoding of header and blocks, if they are also compressed.
            make: Returns the contents when they are first needed; the first is the header.
            sources: The names of the source's tensors that may be in the file, with `make`.
        """
        self.path = path
        self.compression = compression
        self.sources = sources
        self._make = make
        if make is None:
            self.parts = list(parts)
            self.data_start = data_start
            self.size = sum(map(num_bytes, parts))
            self.sources = [part.tensor.source for part in parts if isinstance(part, TensorPayload)]

    @cached_property
    def parts(self) -> list[Part]:
        """The contents, in order."""
        assert self._make is not None
        return list(self._make())

    @cached_property
    def data_start(self) -> int | None:
        """Size of the header in bytes, if header and blocks are hashed."""
        return num_bytes(self.parts[0])

    @cached_property
    def size(self) -> int:
        """Size of the whole file in bytes, before compression."""
        return sum(map(num_bytes, self.parts))

    def release(self) -> None:
        """Drop the contents if they can be made again, once the file is written."""
        if self._make is not None:
            vars(self).pop("parts", None)


def num_bytes(part: Part) -> int:
    """Return the size of a part in bytes."""
    if isinstance(part, bytes):
        return len(part)
    return part.tensor.num_bytes if isinstance(part, TensorPayload) else part.num_bytes


ZIP_START = struct.pack("<4sHH", b"PK\x03\x04", 45, 0x800)
"""The first bytes of a zip of `ZipBuilder`; those of `torch.save` state another version and other flags."""
_WIDE = 0xFFFFFFFF
_ALIGNMENT = 64


class ZipBuilder:
    """A builder of zips as torch writes them.

    Members are stored uncompressed, payloads start at multiples of 64 bytes, and zip64 is used if needed. A
    payload's CRC-32 is known only after the payload is written, so it follows in a data descriptor and in the
    directory.
    """

    def __init__(self, prefix: str = "archive") -> None:
        self.parts: list[Part] = []
        self._prefix = prefix
        self._size = 0
        self._entries: list[tuple[bytes, Part, int, int]] = []

    def add(self, name: str, content: bytes | TensorPayload) -> None:
        """Append a member."""
        path = f"{self._prefix}/{name}".encode()
        begin, length = self._size, num_bytes(content)
        is_wide = length >= _WIDE
        flags = 0x800 | (0x8 if isinstance(content, TensorPayload) else 0)
        crc = zlib.crc32(content) if isinstance(content, bytes) else 0
        extra = struct.pack("<HHQQ", 1, 16, length, length) if is_wide else b""
        data_offset = begin + 30 + len(path) + len(extra) + 4
        extra += struct.pack("<HH", 0x4246, -data_offset % _ALIGNMENT) + b"Z" * (-data_offset % _ALIGNMENT)
        size = _WIDE if is_wide else length
        header = struct.pack(
            "<4sHHHHHIIIHH", b"PK\x03\x04", 45, flags, 0, 0, 0x21, crc, size, size, len(path), len(extra)
        )
        self._put(header + path + extra)
        self._put(content)
        if isinstance(content, TensorPayload):
            descriptor_format = "<4sIQQ" if is_wide else "<4sIII"
            descriptor = ComputedPart(
                struct.calcsize(descriptor_format),
                lambda: struct.pack(descriptor_format, b"PK\x07\x08", content.crc, length, length),
            )
            self._put(descriptor)
        self._entries.append((path, content, begin, flags))

    def finish(self) -> Sequence[Part]:
        """Return all parts, followed by the directory."""
        start = self._size
        directory = ComputedPart(
            sum(46 + len(name) + len(_wide(content, begin)) for name, content, begin, _ in self._entries),
            lambda: b"".join(_central(*entry) for entry in self._entries),
        )
        self._put(directory)
        count = len(self._entries)
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, directory.num_bytes, start
        )
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, self._size, 1)
        count16, size32, start32 = min(count, 0xFFFF), min(directory.num_bytes, _WIDE), min(start, _WIDE)
        end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count16, count16, size32, start32, 0)
        self._put(end64 + locator + end)
        return self.parts

    def _put(self, part: Part) -> None:
        self.parts.append(part)
        self._size += num_bytes(part)


def _wide(content: Part, begin: int) -> bytes:
    """Return the zip64 fields of a directory entry, or nothing if it needs none."""
    length = num_bytes(content)
    numbers = [number for number in (length, length, begin) if number >= _WIDE]
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _central(name: bytes, content: Part, begin: int, flags: int) -> bytes:
    length = min(num_bytes(content), _WIDE)
    crc = (
        content.crc
        if isinstance(content, TensorPayload)
        else zlib.crc32(content)
        if isinstance(content, bytes)
        else 0
    )
    zip64_fields = _wide(content, begin)
    head = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 45, 45, flags, 0, 0, 0x21, crc, length, length,
        len(name), len(zip64_fields), 0, 0, 0, 0, min(begin, _WIDE),
    )  # fmt: skip
    return head + name + zip64_fields
