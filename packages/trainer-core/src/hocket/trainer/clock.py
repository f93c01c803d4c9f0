"""`TrainingClock`: the time that counts as training."""

from __future__ import annotations

import time


class TrainingClock:
    """A clock that stands still during evaluation, so that throughput and time limits leave it out.

    Attributes:
        excluded_s: Seconds that were left out.
    """

    __slots__ = ("excluded_s",)

    def __init__(self) -> None:
        self.excluded_s = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.perf_counter() - self.excluded_s

    def exclude(self, seconds: float) -> None:
        """Leave time out that has just passed."""
        self.excluded_s += seconds
