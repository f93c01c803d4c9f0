"""Schedules that are functions of the state alone, such as `lambda state: …`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.checks import as_list
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim import Scheduler


def as_schedule(given: Any) -> Any:
    """Return a schedule that also takes the ratio; a function of the state alone is wrapped.

    Raises:
        TrainerConfigError: On a call, if the function takes the state alone and the ratio is not 1.
    """
    if isinstance(given, LRScheduler) or not callable(given) or not _takes_state_alone(given):
        return given
    name = getattr(given, "__name__", type(given).__name__)

    @functools.wraps(given, updated=())
    def schedule(state: Any, ssr: float = 1.0) -> float:
        if ssr != 1.0:
            raise TrainerConfigError(
                f"`scale_schedule_ratio` is {ssr}, and the schedule `{name}` takes the state alone; expected "
                "a function `(state, ssr)`"
            )
        return float(given(state))

    schedule.__name__ = name
    return schedule


def as_schedules(given: Any) -> list[Scheduler | LRScheduler] | None:
    """Return schedules that all take the ratio; see `as_schedule`."""
    return None if given is None else [as_schedule(one) for one in as_list(given)]


def _takes_state_alone(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and all(one.kind is not one.VAR_POSITIONAL for one in parameters)


__all__ = ["as_schedule", "as_schedules"]
