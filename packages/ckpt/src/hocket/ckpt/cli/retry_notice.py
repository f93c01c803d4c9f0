"""A notice on standard error while a store does not answer and requests are repeated."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from hocket.native import _native

__all__ = ["retry_notice"]

_LOOK_S = 0.5
_EVERY_S = 5.0


@contextlib.contextmanager
def retry_notice(*, look_s: float = _LOOK_S, every_s: float = _EVERY_S) -> Iterator[None]:
    """Print a line at the first retry of a request to a store, and then at most one every `every_s`.

    Retries continue for up to half a minute, in which the command would otherwise print nothing.
    """
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done, look_s, every_s), name="hocket-retries", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system grants no more threads, and the command may do without this one
        yield
        return
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(done: threading.Event, look_s: float, every_s: float) -> None:
    initial = reported = _native.counters()["retries"]
    wait_s = look_s
    while not done.wait(wait_s):
        retries = _native.counters()["retries"]
        wait_s = look_s
        if retries > reported:
            reported = retries
            tries = f"{retries - initial} {'retry' if retries - initial == 1 else 'retries'} so far"
            print(f"hocket-ckpt: requests to the store fail; {tries}", file=sys.stderr, flush=True)
            wait_s = every_s
