"""`TrainMetrics`: the model's metrics over the batches of an epoch of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from hocket.trainer.log.logger import Logger
from hocket.trainer.metrics.metric_state import load_metric_states, metric_states
from hocket.trainer.metrics.metric_sync import (
    check_values,
    compute_metrics,
    copy_metric,
    forget_value,
    without_sync,
)
from hocket.trainer.optim import step_metric_schedulers
from hocket.trainer.precision import Precision
from hocket.trainer.state import State

if TYPE_CHECKING:
    from torchmetrics import Metric


class TrainMetrics:
    """The updates of `state.train_metrics` with each microbatch, on the device and without reading it.

    The metrics use the outputs of the training's own forward pass. Values after a batch are over the samples
    of this rank since the start of the epoch; values at the end of an epoch or a fit are over all ranks. A
    run that resumes within an epoch on as many ranks continues from the saved metric states.

    Args:
        state: The state of the run.
        logger: The logger of `metrics/train/<Name>`.
        precision: The precision of a forward pass, for models whose `eval_forward` makes one.
        is_kept: Whether checkpoints between two epochs have the metric states of the last epoch.
    """

    def __init__(self, state: State, logger: Logger, precision: Precision, *, is_kept: bool = False) -> None:
        self._state = state
        self._logger = logger
        self._precision = precision
        self._is_finished = True
        self._is_kept = is_kept
        get_metrics = getattr(state.model, "get_metrics", None)
        given: Mapping[str, Metric] = {} if get_metrics is None else get_metrics(is_train=True)
        check_values(given)
        state.train_metrics = {
            name: copy_metric(metric, state.device, state.parallelism) for name, metric in given.items()
        }

    @classmethod
    def of(cls, state: State, logger: Logger, precision: Precision, *, is_kept: bool = False) -> Self | None:
        """Return the metrics of a run; None if the model states none for training."""
        metrics = cls(state, logger, precision, is_kept=is_kept)
        return metrics if state.train_metrics else None

    def update(self, batch: Any, outputs: Any, *, is_counted: bool = True) -> None:
        """Add a microbatch. Called without gradients; collective where `eval_forward` of a sharded model is.

        Args:
            batch: The microbatch, as the model took it.
            outputs: The return value of the model's `forward`.
            is_counted: Whether it has samples that count.
        """
        model: Any = self._state.model
        if (eval_forward := getattr(model, "eval_forward", None)) is not None:
            with self._precision.forward():
                outputs = eval_forward(batch, outputs)
        if not is_counted:
            return
        for metric in self._state.train_metrics.values():
            model.update_metric(batch, outputs, metric)

    def start_epoch(self) -> None:
        """Reset the metrics."""
        for metric in self._state.train_metrics.values():
            metric.reset()

    def end_batch(self, *, should_log: bool) -> None:
        """Log this rank's values, if `should_log`. Called after each batch on every rank; not collective."""
        self._is_finished = False
        if should_log:
            with without_sync(self._state.train_metrics):
                self._log()

    def finish(self) -> None:
        """Log the values over all ranks, unless no batch came since the last call. Collective."""
        if self._is_finished:
            return
        self._is_finished = True
        for metric in self._state.train_metrics.values():
            forget_value(metric)
        values = self._log(keep=True)
        if self._state.schedulers and not self._state.counts.batch_in_epoch:
            step_metric_schedulers(self._state.schedulers, values)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's metric states of the present epoch.

        Between two epochs, return the states of the last epoch if `is_kept`, else an empty dict.
        """
        is_between = not self._state.timestamp.counts.batch_in_epoch
        return {} if is_between and not self._is_kept else metric_states(self._state.train_metrics)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the return value of `state_dict`."""
        load_metric_states(self._state.train_metrics, state)

    def _log(self, *, keep: bool = False) -> dict[str, Any]:
        values = compute_metrics(self._state.train_metrics)
        self._state.train_metric_values.update(values)
        named = {f"metrics/train/{name}": value for name, value in values.items()}
        self._state.metric_values.update(named)
        self._logger.log_metrics(named, keep=keep)
        return named
