"""A callback that stops the training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.monitored_metric import Compare, MonitoredMetric
from hocket.trainer.checks import check_number
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time
from hocket.trainer.timestamp import count_in

if TYPE_CHECKING:
    from hocket.trainer.state import State


class EarlyStopper(Callback):
    """Stops the training when a metric has not improved for some time.

    A metric of an evaluator is checked after each of its evaluations, a training metric at the end of each
    epoch. Training stops when more than `patience` has passed since the best value. The best value is kept
    in checkpoints.

    Args:
        monitor: The metric's name, or its full name such as `"metrics/eval/MulticlassAccuracy"`.
        dataloader_label: `"train"` or an evaluator's label; not needed with a full name.
        comp: A function that returns whether its first argument is better than its second, `"lt"` or `"gt"`.
            By default the metric's `higher_is_better` decides, as in torchmetrics, else a word in its name,
            such as `Loss` or `Accuracy`; it is required where neither does.
        min_delta: Difference from the best value that an improvement must exceed.
        patience: Epochs, or a time in `ep` or `ba`.

    Raises:
        TrainerConfigError: If the metric has no label, or `patience` is negative or has another unit; at the
            start of training, if there is no such metric, or `comp` is required.

    Example:
        >>> stopper = EarlyStopper("metrics/eval/MulticlassAccuracy", patience="3ep")
    """

    reads_outputs = False

    def __init__(
        self,
        monitor: str,
        dataloader_label: str | None = None,
        comp: Compare | str | None = None,
        min_delta: float = 0.0,
        patience: TimeInput = 1,
    ) -> None:
        check_number("min_delta", min_delta, least=-math.inf)
        self.monitor = monitor
        self._metric = MonitoredMetric(monitor, dataloader_label, comp)
        self.min_delta = abs(min_delta)
        self.patience = ensure_time(patience, TimeUnit.EPOCH)
        if self.patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self.patience.value < 0:
            raise TrainerConfigError(
                f"`patience` is `{self.patience}`; expected epochs or batches, such as `3ep` or `500ba`"
            )
        self.best: float | None = None
        """The best value so far."""
        self.best_at: int = 0
        """The time of the best value, in the unit of `patience`."""

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

    def _check(self, state: State) -> None:
        value = self._metric.read(state)
        now = count_in(state.timestamp.counts, self.patience.unit)
        best = self.best
        if best is None or (self._metric.is_better(value, best) and abs(value - best) > self.min_delta):
            self.best, self.best_at = value, now
        elif now - self.best_at > self.patience.value:
            self._metric.stop(
                state,
                f"`{self._metric}` is {value:g} and has not improved on {best:g}, which it had after "
                f"{Time(self.best_at, self.patience.unit).describe()}, for longer than "
                f"{self.patience.describe()}",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its time."""
        return {"best": self.best, "best_at": self.best_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the best value and its time."""
        self.best, self.best_at = state["best"], state["best_at"]
