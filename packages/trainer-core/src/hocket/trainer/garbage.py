"""`collecting_every`: what Python's garbage collector looks at during a fit, and when."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_has_frozen = False
"""Whether a fit of this process has frozen what was there."""


@contextlib.contextmanager
def collecting_every(interval: int | None) -> Iterator[None]:
    """Freeze what is there, and with an interval leave collections to the loop; put both back afterwards.

    A full collection takes 0.1 s and more with torch loaded, and comes on each rank at another batch, so
    that the ranks wait for each other's. What is there at the start is frozen: later collections do not look
    at it, and in a forked worker of a loader they do not copy its memory. Where something is frozen already,
    by the caller or by a fit around this one, that is left as it is.

    Before anything is frozen there is a full collection. Many short fits in one process would spend their
    time on it, so without an interval only the first fit of a process freezes.

    Args:
        interval: Batches between two collections by the loop; None leaves the time to the collector.
    """
    global _has_frozen
    was_enabled = gc.isenabled()
    freezes = not gc.get_freeze_count() and not (_has_frozen and interval is None)
    if freezes:
        gc.collect()  # what is garbage already would stay until the end
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
