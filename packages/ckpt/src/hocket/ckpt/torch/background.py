"""The thread that finishes asynchronous saves, the handle that the caller gets, and what happens at exit."""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["SaveHandle", "Worker", "close_at_exit"]

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save that is done or under way.

    Attributes:
        name: The checkpoint's name.
        uri: Where it is, or will be.
    """

    def __init__(self, name: str, uri: str, future: "Future[None]"):
        self.name = name
        self.uri = uri
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
                raise
            raise CheckpointTimeoutError(
                f"The save of `{self.uri}` is not done after {timeout_s} s."
            ) from error


class Worker:
    """Runs saves one after the other on a thread named `hocket-ckpt-save`, which starts with the first.

    The thread is a daemon: the interpreter would otherwise wait for it without a deadline. `close_at_exit`
    waits for it with one.
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
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread once all tasks are done; whether that was in time."""
        if self._thread is None:
            return True
        self._tasks.put(None)
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

    Exit handlers run on a normal end, on an unhandled exception and on Ctrl-C. SIGTERM's default action ends
    a process on the spot and with it a save in flight, of which only orphans stay: turn it into an exit where
    that matters.
    """
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(store)


def _close_all() -> None:
    for store in list(_open):
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - the others are to be closed, too
            _log.error("closing a checkpoint store failed: %s", error)
