"""The data files of one rank in shared memory, which its saves fill in turns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.ckpt.document.file_names import file_metadata
from hocket.ckpt.torch.ranks.host_folders import MEMORY_FILE
from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptMemoryFile, CkptWritten

__all__ = ["MemoryFiles"]

_numbers = itertools.count()
"""The files of this process are numbered; one that is freed removes its name, which must not be another's."""


class MemoryFiles:
    """Two files, one of which the newest checkpoint has; the next save fills the other.

    A file keeps its pages when its checkpoint is removed, since a new page costs as much as to fill it.

    Args:
        folder: A folder of a store whose checkpoints stay until the next one is committed, and no longer.
        rank: This process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._name = str(folder / f"{MEMORY_FILE}{rank}-{os.getpid()}")
        self._kept: tuple[str, CkptMemoryFile] | None = None
        self._free: tuple[str, CkptMemoryFile] | None = None

    def open(self) -> bool:
        """Return whether there is a file to fill: False where the folder is not in memory.

        Raises:
            StoreError: The file cannot be created.
        """
        if self._free is not None and not os.path.exists(self._free[0]):
            self._free = None  # its folder was removed meanwhile, and a file without a name gets none again
        if self._free is None:
            path = f"{self._name}-{next(_numbers)}"
            file = _native.CkptMemoryFile.create(path)
            self._free = None if file is None else (path, file)
        return self._free is not None

    def fill(self, entries: Sequence[tuple[str, str, Sequence[int], int, int]], save_id: str) -> list[int]:
        """Copy entries, as `ckpt_write_file` takes them in the order of a file; return the addresses."""
        assert self._free is not None, "`open` has been called"
        return self._free[1].fill(entries, file_metadata(save_id))

    def publish(self, uri: str, path: str) -> CkptWritten:
        """Compute the digests, and make the file a data file of a checkpoint."""
        assert self._free is not None, "`fill` has been called"
        return self._free[1].publish(uri, path)

    def keep(self) -> None:
        """Keep the file, whose checkpoint is committed; that of the checkpoint before is filled next."""
        self._free, self._kept = self._kept, self._free

    def give_up(self) -> None:
        """Leave the file of a failed save, which may be committed after all; the next one takes another."""
        self._free = None

    def release(self) -> None:
        """Give the memory of both files back; that of the newest checkpoint stays with it."""
        self._free = self._kept = None
