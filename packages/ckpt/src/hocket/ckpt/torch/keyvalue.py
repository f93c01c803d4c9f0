"""The small stores of keys and values through which ranks hear of each other."""

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from hocket.ckpt.errors import CheckpointTimeoutError

__all__ = ["Alone", "KeyValue", "Patient"]

# A job that was suspended as a whole finds no more than one of these used up when it goes on.
_SLICES = 10
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

    torch's has no deadline for most questions: of a process that is stopped, or a node that no longer sends,
    nobody would ever hear.
    """

    def __init__(self, store: KeyValue, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    def set(self, key: str, value: str, /) -> object:
        """Sets a key."""
        return self._answer(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        return self._answer(lambda: self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""
        return self._answer(lambda: self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""
        return self._answer(lambda: self._store.add(key, amount))

    def delete_key(self, key: str, /) -> bool:
        """Removes a key."""
        return self._answer(lambda: self._store.delete_key(key))

    def _answer(self, question: Callable[[], _T]) -> _T:
        answers: list[_T] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                errors.append(error)

        # One that is left behind asks on until its process ends, and does not keep that from ending.
        thread = threading.Thread(target=ask, name="hocket-ckpt-ask", daemon=True)
        thread.start()
        for _ in range(_SLICES):
            thread.join(self._timeout_s / _SLICES)
        if errors:
            raise errors[0]
        if not answers:
            raise CheckpointTimeoutError(
                f"Rank 0, through which the ranks hear of each other, did not answer within "
                f"{self._timeout_s:g} s. Look for what stopped its process or cut off its node."
            )
        return answers[0]
