"""Asynchronous saves: the background thread, the handles, and the wait for saves at process exit."""

import atexit
import logging
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Protocol

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["SaveHandle", "SaveThread", "close_at_exit", "close_quietly", "hold_sigterm", "release_sigterm"]

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save that has finished or is running.

    Attributes:
        name: The checkpoint's name.
        uri: The checkpoint's location.
        step: The checkpoint's step.
        is_heard: Whether the save failed and its error has been raised to a caller.
        ended_at: The time of the save's end by `time.monotonic`; None while it runs.
    """

    def __init__(self, name: str, uri: str, step: int, future: "Future[None]"):
        self.name = name
        self.uri = uri
        self.step = step
        self.is_heard = False
        self.ended_at: float | None = None
        self._future = future
        future.add_done_callback(self._note_end)

    def __repr__(self) -> str:
        return f"SaveHandle({self.name!r}, {'done' if self.done() else 'under way'})"

    def _note_end(self, _: "Future[None]") -> None:
        self.ended_at = time.monotonic()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: Seconds to wait; None for no limit (each step of a save has its own deadline).

        Raises:
            CheckpointTimeoutError: The save is still running.
            CheckpointError: The save failed; there is no such checkpoint.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError as error:
            if error is self.failure():  # and not only done since the wait ended
                self.is_heard = True
                raise
            raise CheckpointTimeoutError(
                f"the save of `{self.uri}` is not done after {timeout_s} s"
            ) from error
        except BaseException:
            self.is_heard = self._future.done()
            raise

    def failure(self) -> BaseException | None:
        """Return the save's error; None while it runs and when it succeeded."""
        return self._future.exception() if self._future.done() else None


class SaveThread:
    """A daemon thread that runs saves, or other tasks of a store, in order; started by the first one.

    The thread is a daemon because the interpreter would otherwise wait for it without a deadline;
    `close_at_exit` waits with one. It ends after its last task once the worker is garbage-collected.
    """

    def __init__(self, name: str = "hocket-ckpt-save") -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> "Future[None]":
        """Queue a task and return the future of its outcome."""
        if self._thread is None:
            # The thread references the queue and not `self`, so that an unused store can be collected.
            self._thread = threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
            self._end = weakref.finalize(self, self._tasks.put, None)
            self._end.atexit = False  # `stop` takes over
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after its queued tasks; return whether it stopped in time."""
        if self._thread is None:
            return True
        self._end()
        self._thread.join(timeout_s)
        is_stopped, self._thread = not self._thread.is_alive(), None
        return is_stopped


def _work(tasks: "queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]") -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - `wait` on the handle raises it
            _log.error("an asynchronous save failed: %s", error)
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, task, future


class StoreProtocol(Protocol):
    """An object that is closed when the process exits."""

    def close(self) -> None:
        """Wait for running work, with a deadline."""


_open: "weakref.WeakSet[StoreProtocol]" = weakref.WeakSet()


def close_at_exit(store: StoreProtocol) -> None:
    """Register a store to be closed when the process exits, if it still exists then.

    Exit handlers run on a normal end, on an unhandled exception and on Ctrl-C; for SIGTERM see
    `hold_sigterm`.
    """
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(store)


def _close_all() -> None:
    for store in list(_open):
        close_quietly(store)


def close_quietly(store: StoreProtocol) -> None:
    """Close a store and log its error, for use where no caller is left to receive it."""
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - the caller has other stores to close, or a save to begin
        _log.error("closing a checkpoint store failed: %s", error)


class _Term:
    """A SIGTERM handler that closes stores with running saves, then ends the process as SIGTERM does.

    Attributes:
        ends_process: Mark for code that stops the process in another way, such as a trainer at a step
            boundary. It may replace this handler, because stores are also closed when the process exits.
    """

    ends_process = True

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._pid:  # the saves belong to the parent of a fork
            _close_all()
        os.kill(os.getpid(), number)


_holding: "weakref.WeakSet[StoreProtocol]" = weakref.WeakSet()


def hold_sigterm(store: StoreProtocol) -> None:
    """Delay SIGTERM until a store's saves are finished, until `release_sigterm` is called.

    The handler is installed only if SIGTERM has no other handler, and only from the main thread, where Python
    sets and runs handlers: a save that another thread starts does not delay SIGTERM. While the main thread is
    blocked in a call that does not return, such as a collective whose peer is gone, SIGTERM is delayed as
    well.
    """
    _holding.add(store)
    is_ours_to_set = threading.current_thread() is threading.main_thread()
    if is_ours_to_set and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Term())


def release_sigterm(store: StoreProtocol) -> None:
    """Restore SIGTERM's default handler, unless another store still delays the signal."""
    _holding.discard(store)
    is_ours_to_set = threading.current_thread() is threading.main_thread()
    if not _holding and is_ours_to_set and isinstance(signal.getsignal(signal.SIGTERM), _Term):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
