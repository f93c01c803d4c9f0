"""The small stores of keys and values through which ranks hear of each other."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["SLICES", "Alone", "KeyValue", "Patient"]

SLICES = 10
"""Of a deadline: a job that was suspended as a whole finds no more than one used up when it goes on."""

_T = TypeVar("_T")


class KeyValue(Protocol):
    """What is asked of a store; `torch.distributed.Store` has it."""

    def set(self, key: str, value: str, /) -> object:
        """Sets a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""

    def delete_key(self, key: str, /) -> bool:
        """Removes a key."""


class Alone:
    """The store of a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % value
        return value

    def delete_key(self, key: str, /) -> bool:
        """Removes a key."""
        return self._values.pop(key, None) is not None


class Patient:
    """Another process's store, whose answers are waited for so long and no longer.

    torch's has no deadline for most questions, nor for its first: of a process that is stopped, or a node
    that no longer sends, nobody would ever hear. So one thread asks, and whoever wants the answer waits
    beside it. It is there from the beginning: while the interpreter shuts down, when the last save may be
    under way, none can be started any more.
    """

    def __init__(self, connect: Callable[[], KeyValue], *, timeout_s: float, connect_s: float = 60) -> None:
        """Connects.

        Args:
            connect: Opens the store, in time or not.
            timeout_s: How long an answer may take.
            connect_s: How long `connect` may take.

        Raises:
            CheckpointTimeoutError: It took longer.
        """
        self._timeout_s = timeout_s
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # One that never hears an answer asks on until its process ends, and does not keep that from ending.
        threading.Thread(
            target=_ask_all, args=(self._questions,), name="hocket-ckpt-ask", daemon=True
        ).start()
        self._store = self._answer(connect, connect_s)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread, unless it is waiting for an answer that does not come."""
        self._questions.put(None)

    def set(self, key: str, value: str, /) -> object:
        """Sets a key."""
        return self._answer(lambda: self._store.set(key, value), self._timeout_s)

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        return self._answer(lambda: self._store.get(key), self._timeout_s)

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""
        return self._answer(lambda: self._store.check(keys), self._timeout_s)

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""
        return self._answer(lambda: self._store.add(key, amount), self._timeout_s)

    def delete_key(self, key: str, /) -> bool:
        """Removes a key."""
        return self._answer(lambda: self._store.delete_key(key), self._timeout_s)

    def _answer(self, question: Callable[[], _T], timeout_s: float) -> _T:
        answer: Future[_T] = Future()
        self._questions.put(lambda: _ask(question, answer))
        for _ in range(SLICES):
            wait([answer], timeout_s / SLICES)
            if answer.done():
                return answer.result()
        raise CheckpointTimeoutError(
            f"Rank 0, through which the ranks hear of each other, did not answer within {timeout_s:g} s. "
            "Look for what stopped its process or cut off its node."
        )


def _ask_all(questions: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (ask := questions.get()) is not None:
        ask()


def _ask(question: Callable[[], _T], answer: "Future[_T]") -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # noqa: BLE001 - raised where it was asked
        answer.set_exception(error)
