"""Schedules that set learning rates when and as in Composer.

Composer makes a `LambdaLR` of each schedule, and steps all schedulers in the order of the list after the
update of a batch, before the time advances. The rate of batch k is therefore the schedule at batch k - 1, and
the last schedule of several decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.optim import ForOptimizer, MetricScheduler
from hocket.trainer.optim.torch_schedulers import set_rate


class TimedSchedule:
    """A schedule of a state, with the attributes of the schedule that was given.

    Args:
        schedule: A callable `(state, ssr) -> multiplier`.
        state: The state with the optimizers.
    """

    def __init__(self, schedule: Any, state: Any) -> None:
        self._schedule = schedule
        self._state = weakref.ref(state)
        self.__name__ = getattr(schedule, "__name__", type(schedule).__name__)

    def __repr__(self) -> str:
        return f"<TimedSchedule: {self.__name__}>"

    def __call__(self, state: Any, ssr: float = 1.0) -> float:
        """Return the multiplier at a time."""
        return float(self._schedule(state, ssr))

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        state: Any = self._state()
        return [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Set the learning rates for the time of the state; the trainer does so after each batch."""
        state: Any = self._state()
        set_rates_of(self, state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_schedule", "_state"):
            raise AttributeError(name)
        return getattr(self._schedule, name)


def as_timed(schedule: Any, state: Any) -> Any:
    """Wrap a schedule in `TimedSchedule`; return one of torch's, or with a state of its own, unchanged."""
    is_whole = isinstance(schedule, (LRScheduler, ForOptimizer)) or hasattr(schedule, "state_dict")
    return schedule if is_whole or not callable(schedule) else TimedSchedule(_inner(schedule), state)


def set_rates_of(schedule: Any, state: Any) -> None:
    """Set the rates that a schedule has at the time of the state, as `LambdaLR` does."""
    multiplier = float(schedule(state, state.scale_schedule_ratio))
    optimizers: Iterable[Optimizer] = (
        [schedule.optimizer] if isinstance(schedule, ForOptimizer) else state.optimizers
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            set_rate(group, group.setdefault("initial_lr", float(group["lr"])) * multiplier)


def start_schedules(state: Any) -> None:
    """Set the rates at the time at which the schedules were given; torch's schedulers have set theirs."""
    for one in state.schedulers:
        if not isinstance(one, (LRScheduler, MetricScheduler)):
            set_rates_of(one, state)


def step_schedules(state: Any) -> None:
    """Step all schedulers once, in the order of the list."""
    for one in state.schedulers:
        if isinstance(one, LRScheduler):
            one.step()
        elif not isinstance(one, MetricScheduler):
            set_rates_of(one, state)


def is_stepped_every_batch(state: Any) -> bool:
    """Return whether schedulers step with each batch; by default with each epoch if one is of torch."""
    given = state.step_schedulers_every_batch
    return not any(isinstance(one, LRScheduler) for one in state.schedulers) if given is None else bool(given)


def _inner(schedule: Any) -> Any:
    return schedule._schedule if isinstance(schedule, TimedSchedule) else schedule


__all__ = ["TimedSchedule", "as_timed", "is_stepped_every_batch", "start_schedules", "step_schedules"]
