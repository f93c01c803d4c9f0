"""Detection of libraries that divide a data set over ranks again: Accelerate and Hugging Face's Trainer."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from hocket.stream.errors import ConfigError

_LIBRARIES = ("accelerate", "transformers")
# Classes of these libraries that give each rank a part of the data set's output.
_DIVIDERS = ("DataLoaderDispatcher", "IterableDatasetShard")
_MAX_DEPTH = 16


def check_divided_once(world_size: int) -> None:
    """Raise if a library that divides data over ranks is about to read an already divided data set.

    Inspects the callers of this function and, in a DataLoader's worker, the object that the worker reads.

    Args:
        world_size: Ranks over which the data set is divided already.

    Raises:
        ConfigError: Samples would be left out.
    """
    if world_size == 1 or not any(name in sys.modules for name in _LIBRARIES):
        return
    divider = _divider_in_worker() or _divider_above(sys._getframe(1))
    if divider is not None:
        kind = type(divider)
        raise ConfigError(
            f"this data set is divided over {world_size} ranks, and `{kind.__module__}.{kind.__name__}` "
            "divides its samples once more: samples would be left out. Either read it through "
            "`hocket.stream.StreamingDataLoader`, which that library leaves as it is, or make the data set "
            "with `rank=0, world_size=1`, so that the library alone divides it"
        )


def _divider_in_worker() -> object | None:
    torch_data: Any = sys.modules.get("torch.utils.data")
    info = None if torch_data is None else torch_data.get_worker_info()
    return info.dataset if info is not None and _is_divider(info.dataset) else None


def _divider_above(frame: FrameType | None) -> object | None:
    for _ in range(_MAX_DEPTH):
        if frame is None:
            break
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            owner = frame.f_locals.get("self")
            if _is_divider(owner):
                return owner
        frame = frame.f_back
    return None


def _is_divider(owner: object) -> bool:
    is_known = any(
        kind.__name__ in _DIVIDERS and kind.__module__.partition(".")[0] in _LIBRARIES
        for kind in type(owner).__mro__
    )
    if not is_known:
        return False
    # The dispatcher keeps the number of processes in Accelerate's state.
    holder = owner if hasattr(owner, "num_processes") else getattr(owner, "state", None)
    return getattr(holder, "num_processes", 2) > 1
