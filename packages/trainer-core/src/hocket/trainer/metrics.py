"""The queue between the training loop and one logger destination.

The loop puts captured values in and goes on; a thread reads them, which may mean to wait for a device, and
hands the numbers to the destination with the step they belong to, in the order in which they were put.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hocket.trainer.capture import Captured, Number, read
from hocket.trainer.errors import LoggerError

_log = logging.getLogger(__name__)

# How long the thread lets points gather before it takes them: each wake-up makes the loop's thread give way.
_GATHER_S = 0.02


@dataclass(slots=True)
class _Entry:
    """Points of one step, or with `call` something else to do in turn."""

    step: int
    values: dict[str, Captured]
    call: Callable[[], None] | None = None


class MetricsQueue:
    """A bounded queue with a thread of its own, started at the first point.

    A full queue makes room by dropping the oldest points that were put without `keep`, except the last one of
    each name; the points dropped are counted and said at `close`. What is to be kept is kept beyond the
    bound. `put` never waits. A destination that raises is given the next points all the same; its first
    error is said at once as a warning in the log, and raised by `close`.

    Safe to inherit through a fork: the child begins with an empty queue and no thread. Any thread may call
    it.

    Args:
        deliver: Called on the thread with the numbers by name and their step.
        name: The destination's name, for messages.
        capacity: Steps' worth of points to hold; a call of `put` counts as one.
    """

    def __init__(
        self, deliver: Callable[[dict[str, Number], int], None], name: str, *, capacity: int = 4096
    ) -> None:
        self._deliver = deliver
        self.name = name
        self.capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._droppable: OrderedDict[int, None] = OrderedDict()
        self._newest: dict[str, int] = {}  # name → its last entry
        # Entries that stay although they may be dropped, because they hold the last point of a name.
        self._pinned: set[int] = set()
        self._next_entry = 0
        self._is_busy = False
        self._is_urgent = False
        self._is_closing = False
        self._error: Exception | None = None
        self.num_dropped = 0
        """Points dropped so far, a point being one name at one step."""

    def put(self, values: Mapping[str, Captured], step: int, *, keep: bool = False) -> None:
        """Queue points of `step`, captured by `hocket.trainer.capture.capture`. Does not wait.

        Args:
            values: The points by name.
            step: The step they belong to.
            keep: Never drop them; for points of an epoch or an evaluation, not of every step.
        """
        self._add(_Entry(step, dict(values)), keep=keep)

    def call(self, function: Callable[[], None]) -> None:
        """Queue a call that the thread makes in its turn. Does not wait, and is never dropped."""
        self._add(_Entry(0, {}, function), keep=True)

    def _add(self, entry: _Entry, *, keep: bool) -> None:
        if self._pid != os.getpid():
            self._reset()
        with self._changed:
            if self._is_closing:
                raise LoggerError(f"`{self.name}` is closed and takes no more points; log before `close`")
            number = self._next_entry
            self._next_entry += 1
            for name in entry.values:
                self._unpin(self._newest.get(name))
                self._newest[name] = number
            if len(self._entries) >= self.capacity:
                self._make_room()
            self._entries[number] = entry
            if not keep:
                self._droppable[number] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"hocket-metrics-{self.name}", daemon=True
                )
                self._thread.start()
            if 2 * len(self._entries) >= self.capacity:
                self._is_urgent = True
            if len(self._entries) == 1 or self._is_urgent:
                self._changed.notify_all()

    def _unpin(self, number: int | None) -> None:
        """Let an entry go that no longer holds the last point of a name: the oldest, so the first to go."""
        if number is not None and number in self._pinned:
            self._pinned.remove(number)
            self._droppable[number] = None
            self._droppable.move_to_end(number, last=False)

    def _make_room(self) -> None:
        while len(self._entries) >= self.capacity and self._droppable:
            number, _ = self._droppable.popitem(last=False)
            entry = self._entries[number]
            last = {name: value for name, value in entry.values.items() if self._newest[name] == number}
            self.num_dropped += len(entry.values) - len(last)
            if last:
                entry.values = last
                self._pinned.add(number)
            else:
                del self._entries[number]

    def _run(self) -> None:
        # Bound once: a forked child replaces the attribute, and this thread does not exist there.
        changed = self._changed
        while True:
            with changed:
                changed.wait_for(lambda: self._entries or self._is_closing)
                if not self._entries:
                    return
                changed.wait_for(lambda: self._is_urgent or self._is_closing, timeout=_GATHER_S)
                self._is_urgent = False
            self._drain(changed)

    def _drain(self, changed: threading.Condition) -> None:
        while True:
            with changed:
                if not self._entries:
                    return
                number, entry = self._entries.popitem(last=False)
                self._droppable.pop(number, None)
                self._pinned.discard(number)
                self._is_busy = True
            try:
                self._handle(entry)
            finally:
                with changed:
                    self._is_busy = False
                    if not self._entries:
                        changed.notify_all()

    def _handle(self, entry: _Entry) -> None:
        numbers: dict[str, Number] = {}
        for name, captured in entry.values.items():
            try:
                numbers[name] = read(captured)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and raised by `close`
                self._note(error, f"reading `{name}` of step {entry.step} for `{self.name}` failed")
        try:
            if entry.call is not None:
                entry.call()
            elif numbers:
                self._deliver(numbers, entry.step)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error, f"`{self.name}` failed at step {entry.step}")

    def _note(self, error: Exception, what: str) -> None:
        if self._error is None:
            error.add_note(what)
            self._error = error
            _log.warning("%s, and training goes on: %s: %s", what, type(error).__name__, error)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything put so far has been handed over; false when `timeout_s` was not enough."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._entries and not self._is_busy, timeout=timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over what is queued, and end the thread. Says in the log what was dropped or is left undone.

        Args:
            timeout_s: For all of it; a destination that takes longer is left behind, with its points.

        Raises:
            LoggerError: If the destination raised at any time; its first error is the cause.
        """
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._abandon(timeout_s)
        if self.num_dropped:
            _log.warning(
                "`%s` was too slow: %d points of single steps were dropped (never the last of a name, "
                "nor those of an epoch or evaluation); log less often to it",
                self.name,
                self.num_dropped,
            )
            self.num_dropped = 0
        error, self._error = self._error, None
        if error is not None:
            raise LoggerError(f"`{self.name}` raised `{type(error).__name__}`: {error}") from error

    def _abandon(self, timeout_s: float) -> None:
        with self._changed:
            left = sum(len(entry.values) for entry in self._entries.values()) + self._is_busy
            self._entries.clear()
            self._droppable.clear()
            self._pinned.clear()
        _log.warning(
            "`%s` did not take its last %d points within %g s; they are lost", self.name, left, timeout_s
        )
