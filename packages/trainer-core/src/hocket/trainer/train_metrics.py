"""`TrainMetrics`: the model's metrics over the batches of an epoch of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from hocket.trainer.logger import Logger
from hocket.trainer.metric_state import load_metric_states, metric_states
from hocket.trainer.metric_sync import compute_metrics, copy_metric, forget_value, without_sync
from hocket.trainer.precision import Precision
from hocket.trainer.state import State

if TYPE_CHECKING:
    from torchmetrics import Metric


class TrainMetrics:
    """Updates `state.train_metrics` with each microbatch, on the device and without reading it.

    The outputs of the training's own forward pass are measured. Values after a batch are over the samples of
    this rank since the epoch's start; those at the end of an epoch, and of a fit, over all ranks. A run that
    resumes within an epoch on as many ranks goes on with what they had measured.

    Args:
        state: Of the run.
        logger: Gets `metrics/train/<Name>`.
        precision: Of a forward pass, for models whose `eval_forward` makes one.
        is_kept: Whether checkpoints between two epochs have what the last one measured.
    """

    def __init__(self, state: State, logger: Logger, precision: Precision, *, is_kept: bool = False) -> None:
        self._state = state
        self._logger = logger
        self._precision = precision
        self._is_finished = True
        self._is_kept = is_kept
        get_metrics = getattr(state.model, "get_metrics", None)
        given: Mapping[str, Metric] = {} if get_metrics is None else get_metrics(is_train=True)
        state.train_metrics = {
            name: copy_metric(metric, state.device, state.parallelism) for name, metric in given.items()
        }

    @classmethod
    def of(cls, state: State, logger: Logger, precision: Precision, *, is_kept: bool = False) -> Self | None:
        """Return the metrics of a run; None if the model states none for training."""
        metrics = cls(state, logger, precision, is_kept=is_kept)
        return metrics if state.train_metrics else None

    def update(self, batch: Any, outputs: Any) -> None:
        """Add a microbatch. Called without gradients.

        Args:
            batch: As the model took it.
            outputs: Of the model's `forward`.
        """
        model: Any = self._state.model
        if (eval_forward := getattr(model, "eval_forward", None)) is not None:
            with self._precision.forward():
                outputs = eval_forward(batch, outputs)
        for metric in self._state.train_metrics.values():
            model.update_metric(batch, outputs, metric)

    def start_epoch(self) -> None:
        """Begin anew."""
        for metric in self._state.train_metrics.values():
            metric.reset()

    def end_batch(self, *, should_log: bool) -> None:
        """Log this rank's values, if asked. Called after each batch on every rank; not collective."""
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
        self._log(keep=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured on this rank in the present epoch; between two, in the last if kept."""
        is_between = not self._state.timestamp.counts.batch_in_epoch
        return {} if is_between and not self._is_kept else metric_states(self._state.train_metrics)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        load_metric_states(self._state.train_metrics, state)

    def _log(self, *, keep: bool = False) -> None:
        values = compute_metrics(self._state.train_metrics)
        self._state.train_metric_values.update(values)
        named = {f"metrics/train/{name}": value for name, value in values.items()}
        self._state.metric_values.update(named)
        self._logger.log_metrics(named, keep=keep)
