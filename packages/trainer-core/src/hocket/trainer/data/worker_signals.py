"""Workers of a `DataLoader` that outlive a notice of the end, which is sent to every process of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.25


@contextlib.contextmanager
def sparing_workers() -> Iterator[None]:
    """Have workers that are forked within the block leave notices of the end to their parent.

    Slurm, PBS and a launcher send them to all processes of a rank. A worker that ends raises an error in its
    parent, which then cannot save. Workers still end when their parent sends SIGTERM, or has ended.
    """
    try:
        from torch.utils.data._utils import signal_handling
    except ImportError:  # a torch that has moved it
        yield
        return
    handling: Any = signal_handling
    set_handlers = getattr(handling, "_set_worker_signal_handlers", None)
    if set_handlers is None or not hasattr(signal, "sigtimedwait"):
        yield
        return

    def set_and_spare(*arguments: Any) -> None:
        set_handlers(*arguments)
        _spare()

    handling._set_worker_signal_handlers = set_and_spare
    try:
        yield
    finally:
        handling._set_worker_signal_handlers = set_handlers


def _spare() -> None:
    """Receive the signals in a thread of this worker, which can tell who sent them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICES)
    watch = threading.Thread(target=_watch, args=(os.getppid(),), name="hocket-worker-signals", daemon=True)
    watch.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        found = signal.sigtimedwait(_NOTICES, _POLL_S)
        if found is not None and found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)
    os._exit(1)
