"""Clocks of the time spent training, and of the time of a batch."""

from __future__ import annotations

import time


class TrainingClock:
    """A clock that stops during evaluation, so that throughput and time limits exclude it.

    Attributes:
        excluded_s: Seconds excluded so far.
    """

    __slots__ = ("excluded_s",)

    def __init__(self) -> None:
        self.excluded_s = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.perf_counter() - self.excluded_s

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds` from the time."""
        self.excluded_s += seconds


class LapClock:
    """A clock of the time since its last reading."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def read(self) -> float:
        """Return the seconds since the last reading, at first since the clock was made."""
        before, self._last_s = self._last_s, time.perf_counter()
        return self._last_s - before
