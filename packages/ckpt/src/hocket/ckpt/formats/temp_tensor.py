"""Temporary files for decompressed tensors of any size, readable in any order."""

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np

from hocket.ckpt.errors import CheckpointError
from hocket.native import _native

__all__ = ["TempTensor"]

_PIECE_BYTES = 4 << 20


class TempTensor:
    """The tensor of a compressed entry, decompressed in one pass into an unnamed temporary file.

    The file is in `TMPDIR` and is freed with this object, even if the process is killed.

    Raises:
        CheckpointError: The file cannot be created, or the disk is full.
    """

    def __init__(self, unpacker: "_native.ForeignUnpacker") -> None:
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="hocket-")  # noqa: SIM115 - closed by `__del__`
        except OSError as error:
            raise _refused(unpacker.num_bytes, error) from error
        piece = np.empty(min(unpacker.num_bytes, _PIECE_BYTES), np.uint8)
        for offset in range(0, unpacker.num_bytes, _PIECE_BYTES):
            count = min(unpacker.num_bytes - offset, _PIECE_BYTES)
            unpacker.read([(offset, count, piece.ctypes.data)])
            try:
                self._file.write(piece[:count].data)
                self._file.flush()
            except OSError as error:
                self._file.close()
                raise _refused(unpacker.num_bytes, error) from error

    def read(self, reads: Sequence[tuple[int, int, int]]) -> None:
        """Read ranges of the tensor's bytes, as (offset, bytes, address)."""
        for offset, count, address in reads:
            buffer = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
            done = 0
            while done < count:
                num_read = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
                assert num_read, f"{count} bytes at {offset} are not in the file"
                done += num_read

    def __del__(self) -> None:
        """Close the file; it has no name, so this frees it."""
        # The attribute is missing if the file could not be created.
        with contextlib.suppress(AttributeError):
            self._file.close()


def _refused(num_bytes: int, error: OSError) -> CheckpointError:
    folder = tempfile.tempdir or os.environ.get("TMPDIR")
    return CheckpointError(
        f"a compressed item of {num_bytes} bytes, whose tensor is not in C order, could not be unpacked "
        f"{f'below `{folder}`' if folder else 'to a temporary file'}: {error}. Set `TMPDIR` to a folder that "
        "may be written to and has room for it."
    )
