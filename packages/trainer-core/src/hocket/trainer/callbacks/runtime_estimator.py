"""A callback that estimates how long the training will take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.time_units import seconds_per
from hocket.trainer.checks import check_count
from hocket.trainer.errors import TimeUnitError
from hocket.trainer.interval import share_done
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class RuntimeEstimator(Callback):
    """Logs the time left, evaluation included, as `time/remaining_estimate`.

    The time that the present `fit` took for its share of the training is scaled to the share that is left.
    Nothing is logged if the share is not known: without `max_duration`, or with epochs of unknown length.

    Args:
        skip_batches: Batches at the start that are left out, since they are slow.
        time_unit: The unit: `"seconds"`, `"minutes"`, `"hours"` or `"days"`.

    Raises:
        TrainerConfigError: If an argument is out of range.
    """

    reads_outputs = False

    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        check_count("skip_batches", skip_batches, least=0)
        self.skip_batches = skip_batches
        self.time_unit = time_unit
        self._unit_s = seconds_per(time_unit)
        self.metric_units = {"time/remaining_estimate": time_unit}
        self._left_to_skip = skip_batches
        self._start: tuple[float, float] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin anew, and log the unit."""
        self._left_to_skip, self._start = self.skip_batches, None
        logger.log_hyperparameters({"time/remaining_estimate_unit": self.time_unit})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the estimate."""
        try:
            share = min(1.0, share_done(state, state.timestamp.counts))
        except TimeUnitError:
            return
        now_s = time.monotonic()
        if self._left_to_skip > 0:
            self._left_to_skip -= 1
        if self._left_to_skip == 0 and self._start is None:
            self._start = (share, now_s)
            if self.skip_batches:
                return
        if self._start is None or share <= self._start[0]:
            return
        share_then, then_s = self._start
        left_s = (now_s - then_s) * (1.0 - share) / (share - share_then)
        logger.log_metrics({"time/remaining_estimate": left_s / self._unit_s})
