"""`Callback`: code that runs at events of the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.trainer.checks import Described
from hocket.trainer.event import Event
from hocket.trainer.interval import IsTime, every
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class Callback(Described):
    """Base of callbacks: override the methods of the events to listen to, or `run_event` for all of them.

    A method that is not overridden costs nothing: it is not called. Methods receive the live state, so the
    changes of one callback are visible to the next.

    Example:
        >>> class SayLoss(Callback):
        ...     def epoch_end(self, state, logger):
        ...         print(state.timestamp.epoch, float(state.loss))

    Attributes:
        saves_rank_zero_state: Whether a checkpoint holds rank 0's `state_dict` for all ranks. When False,
            every rank must return the same state.
        reads_outputs: Whether `state.outputs` of a training step is read. False holds for the class that sets
            it, not for its subclasses. Outputs that nothing reads are freed before the backward pass.
        measures_update: Whether the callback runs after the others, and after the clipping of gradients by
            `gradient_clipping=`, so that it sees the gradients of the update.
        needs_whole_model: Whether the callback reads or runs the whole model, of which a rank of a pipeline
            has one stage; such a run refuses it.
        metric_units: Units of the metrics that the callback logs, by globs of their names; a run report shows
            them.
    """

    saves_rank_zero_state: bool = False
    reads_outputs: bool = True
    measures_update: bool = False
    needs_whole_model: bool = False
    metric_units: Mapping[str, str] = MappingProxyType({})

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method named after the event; an override is called at every event."""
        getattr(self, event.value)(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Finish work in progress; called when the trainer closes, also after a failure."""

    def post_close(self) -> None:
        """Release resources; called after every callback's `close`, unless this callback's `close` raised."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint; nothing unless overridden."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def init(self, state: State, logger: Logger) -> None:
        """Called at `Event.INIT`."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_LOAD`."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_LOAD`."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.FIT_START`."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_START`."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_START`."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_DATALOADER`."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_DATALOADER`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_START`."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_TRAIN_BATCH`."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_FORWARD`."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_FORWARD`."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_LOSS`."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_LOSS`."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called at `Event.BEFORE_BACKWARD`."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_BACKWARD`."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called at `Event.AFTER_TRAIN_BATCH`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_END`."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.BATCH_CHECKPOINT`."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_END`."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.EPOCH_CHECKPOINT`."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_END`."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at `Event.ITERATION_CHECKPOINT`."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.FIT_END`."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_STANDALONE_START`."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BEFORE_ALL`."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_START`."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BATCH_START`."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BEFORE_FORWARD`."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_AFTER_FORWARD`."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_BATCH_END`."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_END`."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_AFTER_ALL`."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.EVAL_STANDALONE_END`."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_START`."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BATCH_START`."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BEFORE_FORWARD`."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_AFTER_FORWARD`."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_BATCH_END`."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called at `Event.PREDICT_END`."""


class PeriodicCallback(Callback, ABC):
    """Base of callbacks that act at intervals of training, at the end of a batch or of an epoch.

    A subclass that overrides `batch_end` or `epoch_end` calls it here, too.

    Args:
        interval: Time between two calls of `act`, such as `"10ba"` or `"1ep"`; or a function
            `(state, event) -> bool`. See `hocket.trainer.interval.every`.
        at_end: Whether `act` is also called at the end of training.
    """

    def __init__(self, interval: TimeInput | IsTime, *, at_end: bool = False) -> None:
        self._is_time = every(interval, include_end_of_training=at_end)

    @abstractmethod
    def act(self, state: State, logger: Logger) -> None:
        """Act now."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Act, if it is time."""
        if self._is_time(state, Event.BATCH_END):
            self.act(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Act, if it is time, for an interval in epochs."""
        if self._is_time(state, Event.EPOCH_END):
            self.act(state, logger)
