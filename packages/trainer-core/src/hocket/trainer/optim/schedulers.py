"""Learning-rate schedules as pure functions of training time, and the arithmetic that they share.

A schedule reads the timestamp of each batch and stores nothing. A resumed run therefore has the same learning
rates as an uninterrupted one, and a changed `max_duration` takes effect at the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from hocket.trainer.checks import Described, check_number, refuse_class
from hocket.trainer.errors import TimeUnitError, TimeValueError, TrainerConfigError
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time, floor_of_product
from hocket.trainer.timestamp import Timestamp, count_in


class ScheduledState(Protocol):
    """The part of the trainer's state that a schedule reads."""

    @property
    def timestamp(self) -> Timestamp:
        """The training done so far."""

    @property
    def max_duration(self) -> Time | None:
        """The end of training."""

    @property
    def dataloader_len(self) -> Time | int | None:
        """The number of batches in an epoch; None if unknown."""


@runtime_checkable
class Scheduler(Protocol):
    """A callable `(state, ssr) -> multiplier` of every parameter group's initial learning rate.

    Any function with this signature is a schedule. The multipliers of several schedules multiply.
    """

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`; `ssr`, the scale schedule ratio, stretches times."""


def resolve(time: Time, state: ScheduledState, ssr: float) -> tuple[int, TimeUnit]:
    """Convert a schedule's time to a count in a unit that advances with every batch.

    `dur` becomes its share of `max_duration`; epochs become batches. `ssr` stretches every unit except `dur`,
    because the trainer stretches `max_duration` itself.

    Raises:
        TimeUnitError: If the time cannot be converted: seconds, `dur` without a `max_duration`, or epochs
            with a data loader of unknown length.
    """
    if time.unit is TimeUnit.SECOND:
        raise TimeUnitError(
            f"a schedule cannot use the clock: with `{time}`, learning rates would depend on "
            "the machine's speed; expected `ba`, `ep`, `sp`, `tok` or `dur`"
        )
    if time.unit is TimeUnit.DURATION:
        if state.max_duration is None:
            raise TimeUnitError(f"`{time}` is a share of the training, and `max_duration` is not set; set it")
        length, unit = _in_batches(state.max_duration, state)
        return floor_of_product(length * time.value), unit
    length, unit = _in_batches(time, state)
    return (length if ssr == 1.0 else floor_of_product(length * ssr)), unit


def _in_batches(time: Time, state: ScheduledState) -> tuple[int, TimeUnit]:
    if time.unit is not TimeUnit.EPOCH:
        return int(time.value), time.unit
    if state.dataloader_len is None:
        raise TimeUnitError(
            f"`{time}` cannot be converted to batches, because the data loader has no length; "
            "give the time in `ba`, `sp` or `tok`"
        )
    return int(time.value) * int(state.dataloader_len), TimeUnit.BATCH


def progress(state: ScheduledState, time: Time, ssr: float) -> tuple[int, int]:
    """Return the training done so far and the length of `time`, both counted in the unit of `time`."""
    length, unit = resolve(time, state, ssr)
    return count_in(state.timestamp.counts, unit), length


def elapsed(state: ScheduledState, time: Time, ssr: float) -> float:
    """Return the elapsed share of `time`, 0 to 1; 1 for a `time` of zero."""
    done, length = progress(state, time, ssr)
    return min(1.0, done / length) if length > 0 else 1.0


def linear(start: float, end: float, share: float) -> float:
    """Return the value at `share` of a line from `start` to `end`."""
    return start + (end - start) * share


def cosine(alpha_f: float, share: float) -> float:
    """Return the value at `share` of half a cosine from 1 to `alpha_f`."""
    return alpha_f + (1.0 - alpha_f) * 0.5 * (1.0 + math.cos(math.pi * share))


def polynomial(alpha_f: float, power: float, share: float) -> float:
    """Return the value at `share` of a polynomial decay from 1 to `alpha_f`."""
    return float(alpha_f + (1.0 - alpha_f) * (1.0 - share) ** power)


def time_from_zero(name: str, given: TimeInput) -> Time:
    """Make a `Time` of at least zero from an argument.

    Raises:
        TimeValueError: If the time is negative.
    """
    time = ensure_time(given)
    if time.value < 0:
        raise TimeValueError(f"`{name}` is `{time}`; expected a time of zero or more")
    return time


def checked_number(name: str, given: float) -> float:
    """Return an argument that is a finite number; another would go into every weight.

    Raises:
        TrainerConfigError: If it is not such a number.
    """
    check_number(name, given)
    if math.isinf(given):
        raise TrainerConfigError(f"`{name}` is {given!r}; expected a finite number")
    return given


class ConstantScheduler(Described):
    """A constant multiplier `alpha` until `t_max`, and 1 afterwards.

    Args:
        alpha: The multiplier.
        t_max: The end of the constant phase.
    """

    def __init__(self, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        self.alpha = checked_number("alpha", alpha)
        self.t_max = time_from_zero("t_max", t_max)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        return self.alpha if elapsed(state, self.t_max, ssr) < 1.0 else 1.0


class LinearScheduler(Described):
    """A line from `alpha_i` to `alpha_f`, which is reached at `t_max` and kept.

    Args:
        alpha_i: The multiplier at the start.
        alpha_f: The multiplier from `t_max` on.
        t_max: The end of the line.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, *, t_max: TimeInput = "1dur") -> None:
        self.alpha_i = checked_number("alpha_i", alpha_i)
        self.alpha_f = checked_number("alpha_f", alpha_f)
        self.t_max = time_from_zero("t_max", t_max)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        return linear(self.alpha_i, self.alpha_f, elapsed(state, self.t_max, ssr))


class CosineAnnealingScheduler(Described):
    """Half a cosine from 1 down to `alpha_f`, which is reached at `t_max` and kept.

    Args:
        t_max: The end of the cosine.
        alpha_f: The multiplier from `t_max` on.

    Source: Loshchilov and Hutter, SGDR, 2017, equation 5, one cycle.
    """

    def __init__(self, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = time_from_zero("t_max", t_max)
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        return cosine(self.alpha_f, elapsed(state, self.t_max, ssr))


class PolynomialScheduler(Described):
    """A decay `alpha_f + (1 - alpha_f) * (1 - t / t_max) ** power`; `alpha_f` is reached at `t_max` and kept.

    Args:
        power: The exponent.
        t_max: The end of the decay.
        alpha_f: The multiplier from `t_max` on.
    """

    def __init__(self, power: float, t_max: TimeInput = "1dur", *, alpha_f: float = 0.0) -> None:
        self.power = checked_number("power", power)
        self.t_max = time_from_zero("t_max", t_max)
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        return polynomial(self.alpha_f, self.power, elapsed(state, self.t_max, ssr))


class ForOptimizer:
    """A schedule that applies to one of several optimizers; the others' rates do not depend on it.

    Args:
        schedule: `(state, ssr) -> multiplier`.
        optimizer: The optimizer that the schedule applies to.
    """

    def __init__(self, schedule: Scheduler, optimizer: Optimizer) -> None:
        refuse_class("schedule", schedule)
        self.schedule = schedule
        self.optimizer = optimizer
        self.__name__ = getattr(schedule, "__name__", type(schedule).__name__)

    def __repr__(self) -> str:
        return f"<ForOptimizer: {self.__name__} for {type(self.optimizer).__name__}>"

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the schedule's multiplier."""
        return self.schedule(state, ssr)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state; empty for a schedule without one."""
        return dict(getattr(self.schedule, "state_dict", dict)())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if hasattr(self.schedule, "load_state_dict"):
            self.schedule.load_state_dict(state)
