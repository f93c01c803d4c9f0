"""Which epoch the workers of a plain DataLoader began last."""

from __future__ import annotations

import mmap
import struct
from typing import Any

_RECORD = struct.Struct("QQ")


class Beginnings:
    """The epoch that workers began last, in memory that forks share with their parent.

    A spawned worker has memory of its own: there the second beginning is only seen where workers persist.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RECORD.size)

    def is_again(self, epoch: int) -> bool:
        """Note a beginning of `epoch`; return whether the one before was of it too, and it is news."""
        before, is_told = _RECORD.unpack_from(self._memory)
        is_news = before == epoch + 1 and not is_told
        _RECORD.pack_into(self._memory, 0, epoch + 1, is_told or is_news)
        return is_news

    def forget(self) -> None:
        """Forget the epoch: where to go on was said."""
        _, is_told = _RECORD.unpack_from(self._memory)
        _RECORD.pack_into(self._memory, 0, 0, is_told)

    def __reduce__(self) -> tuple[Any, ...]:
        return Beginnings, ()
