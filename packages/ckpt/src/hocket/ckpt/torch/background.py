"""The thread that finishes asynchronous saves, the handle that the caller gets, and what happens at exit."""

import atexit
import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Protocol

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["SaveHandle", "Worker", "close_at_exit", "close_quietly", "hold_sigterm", "release_sigterm"]

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save that is done or under way.

    Attributes:
        name: The checkpoint's name.
        uri: Where it is, or will be.
        step: Its step.
        is_heard: Whether it failed and somebody was told.
    """

    def __init__(self, name: str, uri: str, step: int, future: "Future[None]"):
        self.name = name
        self.uri = uri
        self.step = step
        self.is_heard = False
        self._future = future

    def __repr__(self) -> str:
        return f"SaveHandle({self.name!r}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed.

        Args:
            timeout_s: How long; without, as long as it takes (each of its steps has a deadline of its own).

        Raises:
            CheckpointTimeoutError: It is still under way.
            CheckpointError: The save failed; there is no such checkpoint.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                self.is_heard = True
                raise
            raise CheckpointTimeoutError(
                f"The save of `{self.uri}` is not done after {timeout_s} s."
            ) from error
        except BaseException:
            self.is_heard = self._future.done()
            raise

    def failure(self) -> BaseException | None:
        """Why it failed; None where it is under way, or has ended well."""
        return self._future.exception() if self._future.done() else None


class Worker:
    """Runs saves one after the other on a thread named `hocket-ckpt-save`, which starts with the first.

    The thread is a daemon: the interpreter would otherwise wait for it without a deadline. `close_at_exit`
    waits for it with one. It ends when the worker is dropped, once all tasks are done.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> "Future[None]":
        """Queues a task; returns what becomes of it."""
        if self._thread is None:
            # The thread holds the queue, not us: a store that is dropped can go.
            self._thread = threading.Thread(
                target=_work, args=(self._tasks,), name="hocket-ckpt-save", daemon=True
            )
            self._thread.start()
            self._end = weakref.finalize(self, self._tasks.put, None)
            self._end.atexit = False  # `stop` does it then
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread once all tasks are done; whether that was in time."""
        if self._thread is None:
            return True
        self._end()
        self._thread.join(timeout_s)
        ended, self._thread = not self._thread.is_alive(), None
        return ended


def _work(tasks: "queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the handle
            _log.error("an asynchronous save failed: %s", error)
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, task, future


class Closable(Protocol):
    """What is closed at exit."""

    def close(self) -> None:
        """Waits for what is under way, with a deadline."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(store: Closable) -> None:
    """Has a store closed when the process exits, if it is still there then.

    Exit handlers run on a normal end, on an unhandled exception and on Ctrl-C; see `hold_sigterm`, too.
    """
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(store)


def _close_all() -> None:
    for store in list(_open):
        close_quietly(store)


def close_quietly(store: Closable) -> None:
    """Closes a store where nobody is there to be told of a failure: it is logged."""
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - the caller has other stores to close, or a save to begin
        _log.error("closing a checkpoint store failed: %s", error)


class _Term:
    """SIGTERM's handler while saves may be under way: ends the process as SIGTERM does, but closes first."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._pid:  # a forked child has no part in the saves
            _close_all()
        os.kill(os.getpid(), number)


_holding: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def hold_sigterm(store: Closable) -> None:
    """Has SIGTERM wait for a store's saves, as any other exit does, until `release_sigterm`.

    Only where nobody else handles SIGTERM, and on the main thread, where Python sets and runs handlers: a
    save that another thread begins is not held, and while the main thread stands in a call that does not
    return (a collective whose peer is gone), SIGTERM waits, too.
    """
    _holding.add(store)
    is_ours_to_set = threading.current_thread() is threading.main_thread()
    if is_ours_to_set and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Term())


def release_sigterm(store: Closable) -> None:
    """Gives SIGTERM back, where `hold_sigterm` took it, unless another store still needs it."""
    _holding.discard(store)
    is_ours_to_set = threading.current_thread() is threading.main_thread()
    if not _holding and is_ours_to_set and isinstance(signal.getsignal(signal.SIGTERM), _Term):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
