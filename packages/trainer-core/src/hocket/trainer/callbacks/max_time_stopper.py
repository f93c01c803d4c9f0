"""A callback that stops the training after a wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.errors import TimeValueError
from hocket.trainer.log.logger import Logger
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time

if TYPE_CHECKING:
    from hocket.trainer.state import State


class MaxTimeStopper(Callback):
    """Stops the training when `max_time` of wall-clock time has passed; the last evaluation and save follow.

    The time of training, evaluation and saving counts, and with `over_restarts` also that of the runs before
    a resume. When the clock of any rank reaches the limit, all ranks stop after the same batch.

    Args:
        max_time: A wall-clock time, such as `"90sec"` or `"7h30m"`; a bare number counts seconds.
        over_restarts: Whether time spent before a resume counts. If False, every run gets the whole
            `max_time`, which fits a time limit that a queue puts on each job.

    Raises:
        TimeValueError: If `max_time` is not in seconds, or not positive.
    """

    reads_outputs = False

    saves_rank_zero_state = True

    def __init__(self, max_time: TimeInput, *, over_restarts: bool = True) -> None:
        limit = ensure_time(max_time, TimeUnit.SECOND)
        if limit.unit is not TimeUnit.SECOND or limit.value <= 0:
            raise TimeValueError(f"`max_time` is `{limit}`; expected a wall-clock time such as `7h30m`")
        self.max_time = limit
        self.over_restarts = over_restarts
        self._before_s = 0.0
        self._start_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """The seconds counted so far."""
        return self._before_s + (0.0 if self._start_s is None else time.monotonic() - self._start_s)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        if self._start_s is None:
            self._start_s = time.monotonic()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop if the time is up."""
        if self.elapsed_s >= self.max_time.value:
            state.stop_training()

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds counted so far."""
        return {"elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the seconds of the previous run, if `over_restarts`."""
        if self.over_restarts:
            self._before_s = float(state["elapsed_s"])
