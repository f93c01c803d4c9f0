"""Spans, instants and counters that happen on the host while a profiler is active."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from hocket.trainer.profiler.schedule import ProfilerAction

F = TypeVar("F", bound=Callable[..., Any])

RECORDED = (ProfilerAction.ACTIVE, ProfilerAction.ACTIVE_AND_SAVE)
# A profile left active by mistake must not fill the memory.
MAX_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A span, an instant or a counter."""

    name: str
    category: str
    start_ns: int
    """Nanoseconds since 1970."""
    duration_ns: int | None = None
    """None for an instant or a counter."""
    thread: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """A counter's values, or notes on a span."""
    is_counter: bool = False

    @property
    def end_ns(self) -> int:
        """The end of a span."""
        return self.start_ns + (self.duration_ns or 0)


class Recorder:
    """Collects events of all threads while it is active.

    Attributes:
        action: The profiler's action in the current batch.
        events: The events recorded since the last `take`.
        num_dropped: Events beyond the limit, which were not stored.
    """

    def __init__(self) -> None:
        self.action = ProfilerAction.SKIP
        self.events: list[TraceEvent] = []
        self.num_dropped = 0
        # Durations come from the monotonic clock; its offset makes them comparable with other ranks.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def is_active(self) -> bool:
        """Whether events are recorded now."""
        return self.action in RECORDED

    def now_ns(self) -> int:
        """Return nanoseconds since 1970, by a clock that never goes back."""
        return time.perf_counter_ns() + self._offset_ns

    def add(self, event: TraceEvent) -> None:
        """Store an event; safe from any thread."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_dropped += 1

    def span(self, name: str, category: str, start_ns: int, **values: Any) -> None:
        """Store a span that ends now."""
        end = self.now_ns()
        self.add(TraceEvent(name, category, start_ns, end - start_ns, threading.get_native_id(), values))

    def counter(self, name: str, values: dict[str, Any]) -> None:
        """Store the values of a counter."""
        self.add(
            TraceEvent(
                name, "counter", self.now_ns(), None, threading.get_native_id(), values, is_counter=True
            )
        )

    def take(self) -> list[TraceEvent]:
        """Return the events so far, in order of their starts, and forget them."""
        events, self.events = self.events, []
        return sorted(events, key=lambda event: event.start_ns)


class Marker:
    """Records a piece of the user's own code in the profile.

    Use it as a context manager, as a decorator, or by `start` and `finish`; `instant` and `counter` record a
    point in time. Outside of the recorded batches a marker costs one comparison.

    Args:
        recorder: The profiler's recorder.
        name: The name in the trace.
        actions: The profiler's actions during which to record.
        categories: Names to filter by in a trace viewer.
        record_instant_on_start: Also record an instant at each start.
        record_instant_on_finish: Also record an instant at each end.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        *,
        actions: Sequence[ProfilerAction] = RECORDED,
        categories: Sequence[str] = (),
        record_instant_on_start: bool = False,
        record_instant_on_finish: bool = False,
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._actions = frozenset(actions)
        self._category = ",".join(categories) or "marker"
        self._instants = (record_instant_on_start, record_instant_on_finish)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the started spans, which belong to threads of this process."""
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a marker without started spans."""
        vars(self).update(state)
        self._local = threading.local()

    def start(self) -> None:
        """Start a span; spans of one marker may nest."""
        starts = self._starts()
        starts.append(self._recorder.now_ns() if self._is_on() else None)
        if self._instants[0]:
            self.instant()

    def finish(self) -> None:
        """End the span that was started last on this thread.

        Raises:
            RuntimeError: If none was started.
        """
        starts = self._starts()
        if not starts:
            raise RuntimeError(f"marker `{self._name}` was finished without a start on this thread")
        start = starts.pop()
        if start is not None and self._is_on():
            self._recorder.span(self._name, self._category, start)
        if self._instants[1]:
            self.instant()

    def instant(self) -> None:
        """Record a point in time."""
        if self._is_on():
            thread = threading.get_native_id()
            self._recorder.add(TraceEvent(self._name, self._category, self._recorder.now_ns(), None, thread))

    def counter(self, values: dict[str, float]) -> None:
        """Record values that a trace viewer draws over time."""
        if self._is_on():
            self._recorder.counter(self._name, values)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __call__(self, function: F) -> F:
        """Return `function` with every call recorded."""

        @functools.wraps(function)
        def recorded(*args: Any, **options: Any) -> Any:
            with self:
                return function(*args, **options)

        return recorded  # type: ignore[return-value]  # has the signature of what it wraps

    def _is_on(self) -> bool:
        return self._recorder.action in self._actions

    def _starts(self) -> list[int | None]:
        starts: list[int | None] | None = getattr(self._local, "starts", None)
        if starts is None:
            starts = self._local.starts = []
        return starts
