"""The key-value stores that ranks exchange small messages through."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["SLICES", "DeadlineStore", "KeyValue"]

SLICES = 10
"""Parts of a deadline. Time for which the whole job was suspended uses up at most one part."""

_T = TypeVar("_T")


class KeyValue(Protocol):
    """The methods of `torch.distributed.Store` that are used here."""

    def set(self, key: str, value: Any, /) -> object:
        """Set a key to bytes, which torch's stub does not list."""

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all of these keys exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return its new value."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class DeadlineStore:
    """A client of another process's store, with a deadline for each answer.

    torch's client has no deadline for most calls, nor for connecting, so a rank would wait forever for a
    process that is stopped or a node that no longer answers. One thread makes the calls and the caller waits
    for its answers with a deadline. The thread starts with the client, because no thread can be started while
    the interpreter shuts down, when the last save may still be running.
    """

    def __init__(self, connect: Callable[[], KeyValue], *, timeout_s: float, connect_s: float = 60) -> None:
        """Connect.

        Args:
            connect: Opens the store; may block.
            timeout_s: Seconds that an answer may take.
            connect_s: Seconds that `connect` may take.

        Raises:
            CheckpointTimeoutError: Connecting took longer.
        """
        self._timeout_s = timeout_s
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon thread: one that never gets an answer does not keep the process from ending.
        threading.Thread(
            target=_ask_all, args=(self._questions,), name="hocket-ckpt-ask", daemon=True
        ).start()
        self._store = self._answer(connect, connect_s)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread, unless it is blocked in a call that does not return."""
        self._questions.put(None)

    def set(self, key: str, value: bytes, /) -> object:
        """Set a key."""
        return self._answer(lambda: self._store.set(key, value), self._timeout_s)

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key."""
        return self._answer(lambda: self._store.get(key), self._timeout_s)

    def check(self, keys: list[str], /) -> bool:
        """Return whether all of these keys exist."""
        return self._answer(lambda: self._store.check(keys), self._timeout_s)

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        return self._answer(lambda: self._store.add(key, amount), self._timeout_s)

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        return self._answer(lambda: self._store.delete_key(key), self._timeout_s)

    def _answer(self, request: Callable[[], _T], timeout_s: float) -> _T:
        future: Future[_T] = Future()
        self._questions.put(lambda: _ask(request, future))
        for _ in range(SLICES):
            wait([future], timeout_s / SLICES)
            if future.done():
                return future.result()
        raise CheckpointTimeoutError.of_ranks(
            f"rank 0, through which the ranks hear of each other, did not answer within {timeout_s:g} s. "
            "Look for what stopped its process or cut off its node",
            [0],
            timeout_s,
        )


def _ask_all(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()


def _ask(request: Callable[[], _T], future: "Future[_T]") -> None:
    try:
        future.set_result(request())
    except BaseException as error:  # noqa: BLE001 - raised in the calling thread
        future.set_exception(error)
