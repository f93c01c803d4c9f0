"""A callback that stops the training when a metric reaches a value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.monitored_metric import Compare, MonitoredMetric
from hocket.trainer.checks import check_number
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class ThresholdStopper(Callback):
    """Stops the training when a metric is better than a threshold.

    A metric of an evaluator is checked after each of its evaluations, a training metric at the end of each
    epoch.

    Args:
        monitor: The metric's name, or its full name such as `"metrics/eval/MulticlassAccuracy"`.
        dataloader_label: `"train"` or an evaluator's label; not needed with a full name.
        threshold: The value to reach.
        comp: As for `EarlyStopper`.
        stop_on_batch: Check a training metric after each batch too, which reads it from the device.

    Raises:
        TrainerConfigError: If the metric has no label or there is no threshold; at the start of training, if
            there is no such metric, or `comp` is required.

    Example:
        >>> stopper = ThresholdStopper("MulticlassAccuracy", "eval", 0.98)
    """

    reads_outputs = False

    def __init__(
        self,
        monitor: str,
        dataloader_label: str | None = None,
        threshold: float | None = None,
        *,
        comp: Compare | str | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        if threshold is None:
            raise TrainerConfigError("`threshold` is missing; pass the value to stop at, `threshold=0.98`")
        check_number("threshold", threshold, least=-math.inf)
        self.monitor = monitor
        self._metric = MonitoredMetric(monitor, dataloader_label, comp)
        self.threshold = threshold
        self.stop_on_batch = stop_on_batch

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists and that its values can be compared."""
        self._metric.check(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Check an evaluator's metric."""
        if state.dataloader_label == self._metric.label:
            self._check(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric."""
        if self._metric.is_of_training:
            self._check(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check a training metric, if `stop_on_batch`."""
        if self.stop_on_batch and self._metric.is_of_training:
            self._check(state)

    def _check(self, state: State) -> None:
        value = self._metric.read(state)
        if self._metric.is_better(value, self.threshold):
            reason = f"`{self._metric}` is {value:g}, which is better than the threshold {self.threshold:g}"
            self._metric.stop(state, reason)
