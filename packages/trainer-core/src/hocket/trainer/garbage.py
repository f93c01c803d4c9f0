"""`collecting_every`: Python's garbage collector at agreed batches instead of whenever it likes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_every(interval: int | None) -> Iterator[None]:
    """Leave collections to the loop; put the collector back afterwards as it was.

    A full collection takes 0.1 s and more with torch loaded, and comes on each rank at another batch, so
    that the ranks wait for each other's. What is there at the start is frozen: later collections do not look
    at it.

    Args:
        interval: Batches between two collections by the loop; None leaves the collector alone.
    """
    if interval is None:
        yield
        return
    was_enabled = gc.isenabled()
    gc.collect()  # what is garbage already would stay until the end
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
