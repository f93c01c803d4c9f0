"""Schedules that return the current learning rates, as torch's schedulers in Composer's state do."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.optim.apply import apply_schedulers
from hocket.trainer.optim.schedulers import ForOptimizer


class TimedSchedule:
    """A schedule of a state, with the attributes of the schedule that was given.

    Args:
        schedule: A callable `(state, ssr) -> multiplier`.
        state: The state with the optimizers.
    """

    def __init__(self, schedule: Any, state: Any) -> None:
        self._schedule = schedule
        self._state = weakref.ref(state)

    def __call__(self, state: Any, ssr: float = 1.0) -> float:
        """Return the multiplier at a time."""
        return float(self._schedule(state, ssr))

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        state: Any = self._state()
        return [float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Set the learning rates for the time of the state, by all its schedules; the trainer does so."""
        apply_schedulers(self._state())  # type: ignore[arg-type]  # a state that is alive

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_schedule", "_state"):
            raise AttributeError(name)
        return getattr(self._schedule, name)


def as_timed(schedule: Any, state: Any) -> Any:
    """Wrap a schedule in `TimedSchedule`; return one of torch's, or with a state of its own, unchanged."""
    is_whole = isinstance(schedule, (LRScheduler, ForOptimizer)) or hasattr(schedule, "state_dict")
    return schedule if is_whole or not callable(schedule) else TimedSchedule(_inner(schedule), state)


def _inner(schedule: Any) -> Any:
    return schedule._schedule if isinstance(schedule, TimedSchedule) else schedule


__all__ = ["TimedSchedule", "as_timed"]
