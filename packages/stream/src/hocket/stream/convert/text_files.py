"""Text files of a source, plain or compressed."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from hocket.stream.convert.sample_writer import require
from hocket.stream.errors import SampleError

_CHUNK_BYTES = 1 << 16
#: The most memory that a frame may ask for, as `zstd --long=31` does.
_MAX_WINDOW_BYTES = 1 << 31


class _ZstdFile(io.RawIOBase):
    """A reader of the frames of a zstd file, which raises if the last one is cut off."""

    def __init__(self, path: Path) -> None:
        self._frames = require("zstandard", "zstd").ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._file = path.open("rb")
        self._frame: Any = None
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return the number of bytes; 0 at the end."""
        while not self._ready:
            chunk = self._rest or self._file.read(_CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            frame = self._frame or self._frames.decompressobj()
            self._ready = memoryview(frame.decompress(chunk))
            self._rest = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(_ZstdFile(path), _CHUNK_BYTES),
}
_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError)


def with_compression(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of plain files, and those of the same files compressed."""
    return tuple(suffix + end for end in ("", *_OPENERS) for suffix in suffixes)


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if its name says that it is compressed.

    Raises:
        SampleError: A compressed file is damaged.
        ConfigError: The library that decompresses it is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in _OPENERS:
        with path.open("rb") as plain:
            yield plain
        return
    damage: tuple[type[Exception], ...] = _DAMAGE
    if suffix == ".zst":
        damage = (*damage, require("zstandard", "zstd").ZstdError)
    elif suffix == ".bz2":
        damage = (*damage, OSError)
    try:
        with _OPENERS[suffix](path) as packed:
            yield cast("BinaryIO", packed)
    except damage as error:
        raise SampleError(f"`{path}` is not a {_NAMES[suffix]} file, or is damaged: {error}") from None
