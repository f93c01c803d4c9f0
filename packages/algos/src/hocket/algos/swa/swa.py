"""SWA: the mean of the weights of the last part of training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.algos.checks import check_choice, check_count, check_number
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.order import Order
from hocket.algos.progress import has_come
from hocket.algos.traits import Trait, has_trait
from hocket.algos.weight_average import WeightAverage
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.checkpoint.optimizer_state import SlotsLike
from hocket.trainer.event import Event
from hocket.trainer.time import Time, TimeInput, TimeUnit

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

_STRATEGIES = {"linear": "linear", "lin": "linear", "cos": "cos", "cosine": "cos"}


class SWA(Algorithm):
    """Averages weights from `swa_start` to `swa_end`, and then gives the model their mean.

    Training goes on with the mean until its end, so that batch norm's statistics fit the mean. A parameter
    that is unfrozen while weights are averaged joins the mean with the value that it had while it was frozen.
    The object may be given to one trainer after the other; each trainer starts a new mean.

    Args:
        swa_start: Time at which averaging starts, in `dur` or `ep`.
        swa_end: Time at which the model gets the mean, in the same unit.
        update_interval: Batches or epochs between the weights that are averaged.
        schedule_swa_lr: Anneal learning rates to `swa_lr` from `swa_start` on, in place of the schedulers.
        anneal_strategy: `"linear"` or `"cos"`.
        anneal_steps: Update intervals that annealing takes.
        swa_lr: Learning rate to anneal to; by default the one at `swa_start`, which then stays.

    Raises:
        AlgorithmConfigError: An argument is out of range, or units do not fit together.

    Example:
        >>> SWA(swa_start="0.7dur", swa_end="0.97dur")
        SWA(swa_start='0.7dur', swa_end='0.97dur', update_interval='1ep', schedule_swa_lr=False)

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_END}
    )
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.AVERAGES_WEIGHTS})
    order = Order.SWA

    def __init__(
        self,
        swa_start: TimeInput = "0.7dur",
        swa_end: TimeInput = "0.97dur",
        update_interval: TimeInput = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: str = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ) -> None:
        self.swa_start, self.swa_end, self.update_interval = _times(swa_start, swa_end, update_interval)
        check_choice("schedule_swa_lr", schedule_swa_lr, (False, True))
        check_choice("anneal_strategy", anneal_strategy, tuple(_STRATEGIES))
        check_count("anneal_steps", anneal_steps)
        if swa_lr is not None:
            check_number("swa_lr", swa_lr, least=0)
            if not schedule_swa_lr:
                raise AlgorithmConfigError("`swa_lr` has no effect without `schedule_swa_lr=True`; set it")
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy = _STRATEGIES[anneal_strategy]
        self.anneal_steps = anneal_steps
        self.swa_lr = swa_lr
        is_batches = self.update_interval.unit is TimeUnit.BATCH
        self._event = Event.BATCH_END if is_batches else Event.EPOCH_END
        self._average: WeightAverage | None = None
        self._forget()

    def _forget(self) -> None:
        """Start anew, as for a new trainer."""
        self._num_averaged = 0
        self._num_intervals = 0
        self._is_completed = False
        self._start_rates: list[list[float]] = []

    def match(self, event: Event, state: State) -> bool:
        """Return whether weights are to be averaged or replaced, or learning rates to be set."""
        if event in (Event.BEFORE_LOAD, Event.FIT_START):
            return True
        if event == Event.AFTER_TRAIN_BATCH:
            has_new = self._average is not None and self._average.has_new
            return has_new or (self.schedule_swa_lr and has_come(state, self.swa_start))
        is_end = event in (Event.BATCH_END, Event.EPOCH_END)
        return is_end and not self._is_completed and has_come(state, self.swa_start)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Average the model's weights, replace them by their mean, or set learning rates."""
        if event == Event.BEFORE_LOAD:
            self._average = WeightAverage(state.model, has_buffers=False)
            self._forget()
            if self.swa_end == Time(1.0, "dur"):
                warnings.warn(
                    "`swa_end` is the end of training: batch norm's statistics will not be those of the mean "
                    "weights. End earlier, or call `torch.optim.swa_utils.update_bn` after training",
                    stacklevel=2,
                )
        elif event == Event.FIT_START:
            assert self._average is not None
            self._average.check_is_of(state.model, "SWA")
            self._average.join()
        elif event == Event.AFTER_TRAIN_BATCH:
            assert self._average is not None
            if self._average.has_new:
                self._average.join()
            if self.schedule_swa_lr and has_come(state, self.swa_start):
                self._set_rates(state)
        else:
            self._average_or_finish(event, state)

    def _average_or_finish(self, event: Event, state: State) -> None:
        assert self._average is not None
        if event == self._event:
            if self._num_intervals % self.update_interval.value == 0:
                self._num_averaged += 1
                self._average.update(1.0 / self._num_averaged)
            self._num_intervals += 1
        if event == Event.BATCH_END and self._event == Event.EPOCH_END and _is_epoch_complete(state):
            return  # the weights of this epoch are averaged first, at its end
        if self._num_averaged and has_come(state, self.swa_end):
            self._average.copy_to_model()
            self._is_completed = True

    def _set_rates(self, state: State) -> None:
        """Set learning rates between those at the start and `swa_lr`, in place of the schedulers'."""
        if not self._start_rates:
            self._start_rates = [
                [float(group["lr"]) for group in optimizer.param_groups] for optimizer in state.optimizers
            ]
        share = min(self._num_intervals / self.update_interval.value / self.anneal_steps, 1.0)
        if self.anneal_strategy == "cos":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        for optimizer, rates in zip(state.optimizers, self._start_rates, strict=True):
            for group, start in zip(optimizer.param_groups, rates, strict=True):
                end = start if self.swa_lr is None else self.swa_lr
                group["lr"] = start + (end - start) * share

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second method that averages weights."""
        if has_trait(other, Trait.AVERAGES_WEIGHTS):
            return "each replaces the model's weights by its own average; choose one of them"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far, which is laid out as the parameters, and the counts."""
        if self._average is None:
            return {}
        return {
            "average": dict(self._average.tensors),
            "num_averaged": self._num_averaged,
            "num_intervals": self._num_intervals,
            "is_completed": self._is_completed,
            "start_rates": [list(rates) for rates in self._start_rates],
        }

    def state_to_fill(self) -> dict[str, Any]:
        """Return a place for the mean of a checkpoint, which may be of more or fewer tensors."""
        if self._average is None:
            return {}
        return {**self.state_dict(), "average": SlotsLike(self._average.like())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the mean that `state_dict` returned; a state without it changes nothing."""
        if not isinstance(state.get("average"), Mapping) or not state["average"]:
            return
        assert self._average is not None
        self._average.load(state["average"])
        self._num_averaged = state["num_averaged"]
        self._num_intervals = state["num_intervals"]
        self._is_completed = state["is_completed"]
        self._start_rates = [list(rates) for rates in state["start_rates"]]

    def __repr__(self) -> str:
        return (
            f"SWA(swa_start={self.swa_start.to_timestring()!r}, swa_end={self.swa_end.to_timestring()!r}, "
            f"update_interval={self.update_interval.to_timestring()!r}, "
            f"schedule_swa_lr={self.schedule_swa_lr!r})"
        )


def _is_epoch_complete(state: State) -> bool:
    """Return whether the present epoch has no further batch; False if its length is not known."""
    return state.dataloader_len is not None and state.timestamp.counts.batch_in_epoch >= state.dataloader_len


def _times(start: TimeInput, end: TimeInput, interval: TimeInput) -> tuple[Time, Time, Time]:
    start_time, end_time = (Time.from_input(given, TimeUnit.EPOCH) for given in (start, end))
    interval_time = Time.from_input(interval, TimeUnit.EPOCH)
    for name, time in (("swa_start", start_time), ("swa_end", end_time)):
        if time.unit not in (TimeUnit.DURATION, TimeUnit.EPOCH) or time.unit != start_time.unit:
            raise AlgorithmConfigError(
                f"`{name}` is `{time.to_timestring()}`, expected both in `dur` or both in `ep`"
            )
        if time.value < 0 or (time.unit is TimeUnit.DURATION and time.value > 1):
            raise AlgorithmConfigError(f"`{name}` is `{time.to_timestring()}`, expected 0 to 1 in `dur`")
    if start_time >= end_time:
        raise AlgorithmConfigError(
            f"`swa_start` is `{start_time.to_timestring()}` and `swa_end` `{end_time.to_timestring()}`, "
            "expected a later end"
        )
    if interval_time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or interval_time.value < 1:
        raise AlgorithmConfigError(
            f"`update_interval` is `{interval_time.to_timestring()}`, expected at least 1 in `ba` or `ep`"
        )
    return start_time, end_time, interval_time
