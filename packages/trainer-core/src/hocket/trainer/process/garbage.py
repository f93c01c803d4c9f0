"""`collecting_every`: the settings of Python's garbage collector during a fit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_has_frozen = False
"""Whether a fit of this process has frozen objects."""


@contextlib.contextmanager
def collecting_every(interval: int | None) -> Iterator[None]:
    """Freeze existing objects, and with an interval leave collections to the loop; undo both afterwards.

    A full collection takes 0.1 s or more with torch loaded, and happens at a different batch on each rank, so
    that the ranks wait for each other's. Objects that exist at the start are frozen: later collections skip
    them, and in a forked worker of a loader do not copy their memory. If objects are frozen already, by the
    caller or by an enclosing fit, nothing is frozen or unfrozen here.

    A full collection precedes the freeze. Many short fits in one process would spend their time on it, so
    without an interval only the first fit of a process freezes.

    Args:
        interval: Batches between two collections by the loop; None for Python's automatic collections.
    """
    global _has_frozen
    was_enabled = gc.isenabled()
    freezes = not gc.get_freeze_count() and not (_has_frozen and interval is None)
    if freezes:
        gc.collect()  # frozen garbage would stay until the end
        gc.freeze()
        _has_frozen = True
    if interval is not None:
        gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if interval is not None and was_enabled:
            gc.enable()
