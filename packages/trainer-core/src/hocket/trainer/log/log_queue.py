"""The queue between the training loop and one or several logger destinations.

The loop puts captured values into the queue and goes on. A thread reads them, which may wait for a device,
and hands the numbers and their step to each destination, in the order of the puts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from hocket.trainer.errors import LoggerError
from hocket.trainer.log.deferred_value import Captured, Number, read

_log = logging.getLogger(__name__)

# Time for which points gather before the thread takes them: each wake-up interrupts the loop's thread.
_GATHER_S = 0.1


@dataclass(slots=True, eq=False)
class LogReceiver:
    """A destination at the end of a queue.

    Attributes:
        deliver: Called on the queue's thread with the numbers by name and their step. Where a queue has
            several receivers, they get the same dict and must not change it.
        name: The destination's name, for messages.
        after_delivery: Called on the thread when it has handed over all entries that it took, for example to
            write out the destination's buffer.
        error: The first error of the destination that `LogQueue.close` has not raised yet.
    """

    deliver: Callable[[dict[str, Number], int], None]
    name: str
    after_delivery: Callable[[], None] | None = None
    error: Exception | None = None


_Entry: TypeAlias = tuple[int, Mapping[str, Captured], Sequence[LogReceiver], Callable[[], None] | None, bool]
"""A step, its points, their receivers, a function to call instead (or None), and whether to keep them.

A plain tuple, because two are made in each step of a run that logs.
"""


class LogQueue:
    """A bounded queue with a thread of its own, started at the first point.

    A full queue makes room by dropping the oldest points that were put without `keep`, except the last one of
    each name; `close` reports the number of dropped points. Points put with `keep` may exceed the capacity.
    `put` never waits. A destination that raises still gets the next points; its first error is logged at once
    as a warning, and raised by `close`.

    A put appends to an inbox, without a lock. The thread moves the inbox into the queue when it wakes, and a
    put does so when the inbox holds half the capacity. A put during `close` either arrives or raises: the
    thread sets `_is_closed` before its last look at the inbox, and a put reads it after appending.

    Safe in forks and threads: a forked child begins with an empty queue and no thread, and any thread may
    call the methods. Entries that are taken in time go from the inbox straight to the destination; only
    entries that wait longer are searched for points to drop.

    Args:
        *receivers: The destinations, each of which gets every point unless `put` names some of them. They
            share the thread, so a slow one delays the others.
        capacity: Maximum number of entries; each call of `put` is one entry.
    """

    def __init__(self, *receivers: LogReceiver, capacity: int = 4096) -> None:
        self.receivers = receivers
        self.name = "`, `".join(receiver.name for receiver in receivers)
        self.capacity = capacity
        self._inherited: object = None
        self._reset()
        _queues.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inbox: deque[_Entry] = deque()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._droppable: OrderedDict[int, None] = OrderedDict()
        self._newest: dict[tuple[Any, ...], int] = {}  # receivers and name → its last entry
        # Entries that stay although they may be dropped, because they hold the last point of a name.
        self._pinned: set[int] = set()
        self._next_entry = 0
        self._taken: deque[_Entry] = deque()
        self._in_delivery: _Entry | None = None
        self._is_busy = False
        self._is_idle = True
        self._is_urgent = False
        self._is_closing = False
        self._is_closed = False
        self._num_dropped = 0
        for receiver in self.receivers:
            receiver.error = None

    @property
    def num_dropped(self) -> int:
        """Points dropped so far, a point being one name at one step."""
        with self._changed:
            if not self._is_closed:
                self._settle()
            return self._num_dropped

    def put(
        self,
        values: Mapping[str, Captured],
        step: int,
        *,
        keep: bool = False,
        to: Sequence[LogReceiver] | None = None,
    ) -> None:
        """Queue points of `step`, captured by `hocket.trainer.log.deferred_value.capture`. Does not wait.

        Args:
            values: The points by name; not changed afterwards.
            step: The step they belong to.
            keep: Never drop them; for points of an epoch or an evaluation, not of every step.
            to: The receivers that get them; None for all of the queue.
        """
        if self._is_closing:
            self._refuse()
        entry = (step, values, to or self.receivers, None, keep)
        self._inbox.append(entry)
        # The thread sets `_is_idle` before it looks at the inbox, so no point is overlooked.
        if self._is_idle or self._is_closed or 2 * len(self._inbox) >= self.capacity:
            self._wake(entry)

    def call(self, function: Callable[[], None], to: LogReceiver | None = None) -> None:
        """Queue a call that the thread makes in its turn. Does not wait, and is never dropped.

        Args:
            function: The function to call.
            to: The receiver that an error of the call is attributed to; the first one by default.
        """
        if self._is_closing:
            self._refuse()
        entry: _Entry = (0, {}, (to or self.receivers[0],), function, True)
        self._inbox.append(entry)
        if self._is_idle or self._is_closed or 2 * len(self._inbox) >= self.capacity:
            self._wake(entry)

    def _wake(self, entry: _Entry) -> None:
        with self._changed:
            if self._is_closed:
                try:
                    self._inbox.remove(entry)
                except ValueError:
                    return  # the thread took it at its last look
                self._refuse()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"hocket-metrics-{self.name.replace('`', '')}", daemon=True
                )
                self._thread.start()
            if 2 * (len(self._inbox) + len(self._entries)) >= self.capacity:
                self._settle()
                self._is_urgent = True
            self._is_idle = False
            self._changed.notify_all()

    def _refuse(self) -> NoReturn:
        raise LoggerError(f"`{self.name}` is closed and takes no more points; log before `close`")

    def _settle(self) -> None:
        """Move the inbox into the queue, and make room for it. The caller holds the lock."""
        for _ in range(len(self._inbox)):
            entry = self._inbox.popleft()
            _, values, to, _, keep = entry
            number = self._next_entry
            self._next_entry += 1
            for name in values:
                point = (*to, name)
                self._unpin(self._newest.get(point))
                self._newest[point] = number
            if len(self._entries) >= self.capacity:
                self._make_room()
            self._entries[number] = entry
            if not keep:
                self._droppable[number] = None

    def _unpin(self, number: int | None) -> None:
        """Make a pinned entry the first to drop, because it no longer holds the last point of a name."""
        if number is not None and number in self._pinned:
            self._pinned.remove(number)
            self._droppable[number] = None
            self._droppable.move_to_end(number, last=False)

    def _make_room(self) -> None:
        while len(self._entries) >= self.capacity and self._droppable:
            number, _ = self._droppable.popitem(last=False)
            step, values, to, call, keep = self._entries[number]
            last_values = {name: value for name, value in values.items() if self._newest[*to, name] == number}
            self._num_dropped += len(values) - len(last_values)
            if last_values:
                self._entries[number] = (step, last_values, to, call, keep)
                self._pinned.add(number)
            else:
                del self._entries[number]

    def _run(self) -> None:
        # Bound once: a forked child replaces the attribute, and this thread does not exist there.
        changed = self._changed
        while True:
            with changed:
                if not self._has_work():
                    self._is_idle = True
                    changed.wait_for(lambda: self._has_work() or self._is_closing)
                    self._is_idle = False
                if not self._has_work():
                    self._is_closed = True
                if not self._has_work():
                    return
                changed.wait_for(lambda: self._is_urgent or self._is_closing, timeout=_GATHER_S)
                self._is_urgent = False
                self._take()
            try:
                self._deliver_taken()
            finally:
                with changed:
                    self._is_busy = False
                    if not self._has_work():
                        changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._entries or self._inbox)

    def _take(self) -> None:
        """Take all entries for delivery. The caller holds the lock."""
        self._is_busy = True
        if not self._entries:
            # No entry had to wait, so there is nothing to drop, and last points need no record.
            for _ in range(len(self._inbox)):
                self._taken.append(self._inbox.popleft())
            return
        self._settle()
        self._taken.extend(self._entries.values())
        self._entries.clear()
        self._droppable.clear()
        self._pinned.clear()

    def _deliver_taken(self) -> None:
        taken = self._taken
        try:
            while True:
                self._in_delivery = entry = taken.popleft()
                self._handle(entry)
        except IndexError:  # all are delivered, or `close` gave up on them
            self._in_delivery = None
        for receiver in self.receivers:
            if receiver.after_delivery is not None:
                try:
                    receiver.after_delivery()
                except Exception as error:  # noqa: BLE001 - it is said, and raised by `close`
                    _note(receiver, error, f"`{receiver.name}` failed to write out what it was given")

    def _handle(self, entry: _Entry) -> None:
        """Make an entry's call, or read its points and hand them to its receivers. Raises nothing."""
        step, values, to, call, _ = entry
        if call is not None:
            (receiver,) = to
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and raised by `close`
                _note(receiver, error, f"`{receiver.name}` failed at step {step}")
            return
        numbers: dict[str, Number] = {}
        for name, captured in values.items():
            if not callable(captured):
                numbers[name] = captured
                continue
            try:
                numbers[name] = read(captured)
            except Exception as error:  # noqa: BLE001 - as above
                _note(to[0], error, f"reading `{name}` of step {step} failed")
        if not numbers:
            return
        for receiver in to:
            try:
                receiver.deliver(numbers, step)
            except Exception as error:  # noqa: BLE001 - as above
                _note(receiver, error, f"`{receiver.name}` failed at step {step}")

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything put so far has been handed over; return False on a timeout."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._has_work() and not self._is_busy, timeout=timeout_s
            )

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over all entries and end the thread; log a warning about points that were dropped or lost.

        Args:
            timeout_s: Seconds to wait in total; the points of a destination that takes longer are lost.

        Raises:
            LoggerError: If a destination raised at any time; its first error is the cause. If several raised,
                the error is the first destination's, with notes on the others.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
            if thread is None:
                self._is_closed = True
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._abandon(timeout_s)
        if num_dropped := self.num_dropped:
            _log.warning(
                "`%s` was too slow: %d points of single steps were dropped (never the last of a name, "
                "nor those of an epoch or evaluation); log less often to it",
                self.name,
                num_dropped,
            )
            self._num_dropped = 0
        raise_first([error for receiver in self.receivers if (error := _take_error(receiver)) is not None])

    def _abandon(self, timeout_s: float) -> None:
        with self._changed:
            self._is_closed = True
            self._settle()
            current = () if self._in_delivery is None else (self._in_delivery,)
            num_lost = sum(len(values) for _, values, *_ in (*current, *self._taken, *self._entries.values()))
            self._taken.clear()
            self._entries.clear()
            self._droppable.clear()
            self._pinned.clear()
        _log.warning(
            "`%s` did not take its last %d points within %g s; they are lost", self.name, num_lost, timeout_s
        )


def _note(receiver: LogReceiver, error: Exception, note: str) -> None:
    """Report a receiver's first error as a warning, and keep it for `close`."""
    if receiver.error is None:
        error.add_note(note)
        receiver.error = error
        _log.warning("%s, and training goes on: %s: %s", note, type(error).__name__, error)


def _take_error(receiver: LogReceiver) -> LoggerError | None:
    error, receiver.error = receiver.error, None
    if error is None:
        return None
    logger_error = LoggerError(f"`{receiver.name}` raised `{type(error).__name__}`: {error}")
    logger_error.__cause__ = error
    return logger_error


def raise_first(errors: Sequence[LoggerError]) -> None:
    """Raise the first of some errors, with notes on the others; nothing if there are none."""
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(str(other))
    raise errors[0]


# The queues to reset in a forked child; comparing process ids at each put would cost the step more.
_queues: weakref.WeakSet[LogQueue] = weakref.WeakSet()


def _reset_all() -> None:
    for queue in _queues:
        # The parent's points stay alive here: freeing events and pinned memory of a device fails in a child.
        queue._inherited = (queue._inbox, queue._entries, queue._taken)
        queue._reset()


os.register_at_fork(after_in_child=_reset_all)
