"""What a compressed item unpacks to, in a temporary file: to be read in any order, however large it is."""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from hocket.ckpt.errors import CheckpointError
from hocket.native import _native

__all__ = ["Spilled"]

_PIECE_BYTES = 4 << 20


class Spilled:
    """The tensor inside a compressed item, unpacked in one pass to a file without a name.

    The file is where `TMPDIR` says and goes with this object, even if the process is killed.

    Raises:
        CheckpointError: It has no room there.
    """

    def __init__(self, unpacker: "_native.ForeignUnpacker") -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="hocket-")  # noqa: SIM115 - closed by `__del__`
        piece = np.empty(min(unpacker.num_bytes, _PIECE_BYTES), np.uint8)
        for offset in range(0, unpacker.num_bytes, _PIECE_BYTES):
            count = min(unpacker.num_bytes - offset, _PIECE_BYTES)
            unpacker.read([(offset, count, piece.ctypes.data)])
            try:
                self._file.write(piece[:count].data)
                self._file.flush()
            except OSError as error:
                self._file.close()
                raise CheckpointError(
                    f"a compressed item of {unpacker.num_bytes} bytes, whose tensor is not in C order, could "
                    f"not be unpacked below `{tempfile.gettempdir()}`: {error}. Set `TMPDIR` to one "
                    "with room for it."
                ) from error

    def read(self, reads: Sequence[tuple[int, int, int]]) -> None:
        """Reads ranges of the tensor's bytes, as (offset, bytes, address)."""
        for offset, count, address in reads:
            buffer = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
            done = 0
            while done < count:
                got = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
                assert got, f"{count} bytes at {offset} are not in the file"
                done += got

    def __del__(self) -> None:
        """Closes the file, which has no name: it is gone then."""
        self._file.close()
