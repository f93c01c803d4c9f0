"""Schedules that drop in steps or start again in cycles."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.trainer.checks import Described
from hocket.trainer.errors import TimeValueError
from hocket.trainer.optim.schedulers import (
    ScheduledState,
    checked_number,
    cosine,
    progress,
    resolve,
    time_from_zero,
)
from hocket.trainer.time import Time, TimeInput, ensure_time
from hocket.trainer.timestamp import count_in


class StepScheduler(Described):
    """The multiplier `gamma ** floor(t / step_size)`.

    Args:
        step_size: The time between two drops.
        gamma: The factor of each drop.

    Raises:
        TimeValueError: If `step_size` is not positive.
    """

    def __init__(self, step_size: TimeInput, gamma: float = 0.1) -> None:
        self.step_size = _positive(step_size, "step_size")
        self.gamma = checked_number("gamma", gamma)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        done, length = _progress(state, self.step_size, ssr, "step_size")
        return float(self.gamma ** (done // length))


class MultiStepScheduler(Described):
    """The multiplier `gamma ** n`, where `n` is the number of milestones reached.

    Args:
        milestones: Times, in any order and in any units.
        gamma: The factor of each drop.
    """

    def __init__(self, milestones: TimeInput | Iterable[TimeInput], gamma: float = 0.1) -> None:
        self.milestones = as_times(milestones)
        self.gamma = checked_number("gamma", gamma)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        return multi_step(self.milestones, self.gamma, state, ssr)


class ExponentialScheduler(Described):
    """The multiplier `gamma ** (t / decay_period)`.

    Args:
        gamma: The factor of each period.
        decay_period: The time in which the learning rate is multiplied by `gamma`.

    Raises:
        TimeValueError: If `decay_period` is not positive.
    """

    def __init__(self, gamma: float, decay_period: TimeInput = "1ep") -> None:
        self.gamma = checked_number("gamma", gamma)
        self.decay_period = _positive(decay_period, "decay_period")

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        done, length = _progress(state, self.decay_period, ssr, "decay_period")
        return float(self.gamma ** (done / length))


class CosineAnnealingWarmRestartsScheduler(Described):
    """Cycles of half a cosine from 1 down to `alpha_f`, each `t_mult` times as long as the one before.

    Args:
        t_0: The length of the first cycle.
        t_mult: The growth of the cycles, at least 1.
        alpha_f: The multiplier at the end of each cycle.

    Raises:
        TimeValueError: If `t_0` is not positive or `t_mult` is below 1.

    Source: Loshchilov and Hutter, SGDR, 2017, equation 5.
    """

    def __init__(self, t_0: TimeInput, t_mult: float = 1.0, *, alpha_f: float = 0.0) -> None:
        checked_number("t_mult", t_mult)
        if t_mult < 1.0:
            raise TimeValueError(f"`t_mult` is {t_mult}; expected at least 1, since cycles may not shrink")
        self.t_0 = _positive(t_0, "t_0")
        self.t_mult = t_mult
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        done, length = _progress(state, self.t_0, ssr, "t_0")
        if self.t_mult == 1.0:
            return cosine(self.alpha_f, done % length / length)
        while done >= length:
            done -= length
            length = int(self.t_mult * length)
        return cosine(self.alpha_f, done / length)


def as_times(times: TimeInput | Iterable[TimeInput]) -> tuple[Time, ...]:
    """Return one time or several as a tuple."""
    time_inputs = [times] if isinstance(times, (str, Time, int, float)) else times
    return tuple(time_from_zero("milestones", time) for time in time_inputs)


def multi_step(milestones: Iterable[Time], gamma: float, state: ScheduledState, ssr: float) -> float:
    """Return `gamma` to the power of the number of milestones reached."""
    reached = 0
    for milestone in milestones:
        length, unit = resolve(milestone, state, ssr)
        reached += count_in(state.timestamp.counts, unit) >= length
    return float(gamma**reached)


def _positive(given: TimeInput, name: str) -> Time:
    time = ensure_time(given)
    if time.value <= 0:
        raise TimeValueError(f"`{name}` is `{time}`; expected a positive time such as `1ep`")
    return time


def _progress(state: ScheduledState, time: Time, ssr: float, name: str) -> tuple[int, int]:
    done, length = progress(state, time, ssr)
    if length < 1:
        raise TimeValueError(
            f"`{name}` (`{time}`) comes to less than one unit with `max_duration` `{state.max_duration}` and "
            f"a scale schedule ratio of {ssr}; make it longer"
        )
    return done, length
