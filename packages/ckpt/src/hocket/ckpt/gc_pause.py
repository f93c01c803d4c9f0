"""A pause of Python's garbage collector, for work that makes many objects and no garbage."""

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["gc_paused"]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; for at most a few seconds.

    A plan or a manifest of 20,000 tensors has some 500,000 objects. While they are created, the collector
    repeatedly scans all objects of the process, including torch's, which takes half of the time. In a thread
    other than the main one this does nothing, because the main thread may switch the collector on or off
    meanwhile.
    """
    is_paused = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if is_paused:
        gc.disable()
    try:
        yield
    finally:
        if is_paused:
            gc.enable()
