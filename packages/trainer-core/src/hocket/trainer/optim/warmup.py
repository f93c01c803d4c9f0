"""Schedules that start with a warmup, a line from 0, and continue with another schedule."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from hocket.trainer.checks import Described
from hocket.trainer.errors import TimeUnitError
from hocket.trainer.optim.schedulers import (
    ScheduledState,
    checked_number,
    cosine,
    elapsed,
    linear,
    polynomial,
    resolve,
    time_from_zero,
)
from hocket.trainer.optim.step_schedulers import as_times, multi_step
from hocket.trainer.time import Time, TimeInput
from hocket.trainer.timestamp import count_in


def warmup_time(t_warmup: TimeInput, owner: object, *, stacklevel: int = 3) -> Time:
    """Check a warmup's length, and warn of a warmup of zero.

    Raises:
        TimeValueError: If the time is negative.
    """
    time = time_from_zero("t_warmup", t_warmup)
    if time.value == 0:
        warnings.warn(
            f"`{type(owner).__name__}` has a warmup of zero and starts at the full learning rate; "
            "use the schedule of the same name without warmup",
            stacklevel=stacklevel + 1,
        )
    return time


class _WithWarmup(Described):
    """The times of a schedule with warmup.

    The warmup rises from 0 to the first value of the schedule that follows; that schedule runs over the rest
    of the time until `t_max`: its share is (t - t_warmup) / (t_max - t_warmup).
    """

    def __init__(self, t_warmup: TimeInput, t_max: TimeInput, *, scale_warmup: bool) -> None:
        self.t_warmup = warmup_time(t_warmup, self, stacklevel=3)
        self.t_max = time_from_zero("t_max", t_max)
        self.scale_warmup = scale_warmup

    def _shares(self, state: ScheduledState, ssr: float) -> tuple[float, float]:
        """Return the elapsed shares of the warmup and of the schedule after it, each 0 to 1."""
        warmup, unit = resolve(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        end, end_unit = resolve(self.t_max, state, ssr)
        if unit is not end_unit:
            raise TimeUnitError(
                f"`t_warmup` (`{self.t_warmup}`) is counted in `{unit.value}` and `t_max` (`{self.t_max}`) "
                f"in `{end_unit.value}`; give both in one unit, or one of them in `dur`"
            )
        now = count_in(state.timestamp.counts, unit)
        if now < warmup:
            return now / warmup, 0.0
        # If the warmup is as long as the whole schedule, the multiplier stays at the top of the warmup.
        return 1.0, (min(1.0, (now - warmup) / (end - warmup)) if end > warmup else 0.0)


class LinearWithWarmupScheduler(_WithWarmup):
    """A line from 0 up to `alpha_i` over `t_warmup`, then a line to `alpha_f`, reached at `t_max` and kept.

    Args:
        t_warmup: The length of the warmup.
        alpha_i: The multiplier at the end of the warmup.
        alpha_f: The multiplier from `t_max` on.
        t_max: The end of the second line, counted from the start of training.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        alpha_i: float = 1.0,
        *,
        alpha_f: float = 0.0,
        t_max: TimeInput = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup=scale_warmup)
        self.alpha_i = checked_number("alpha_i", alpha_i)
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        warmup, share = self._shares(state, ssr)
        return self.alpha_i * warmup if warmup < 1.0 else linear(self.alpha_i, self.alpha_f, share)


class ConstantWithWarmupScheduler(LinearWithWarmupScheduler):
    """A line from 0 up to `alpha` over `t_warmup`, then that constant.

    Args:
        t_warmup: The length of the warmup.
        alpha: The multiplier from the end of the warmup on.
        t_max: Accepted for symmetry with the other schedules; the multiplier does not change there.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        alpha: float = 1.0,
        *,
        t_max: TimeInput = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        alpha = checked_number("alpha", alpha)
        super().__init__(t_warmup, alpha, alpha_f=alpha, t_max=t_max, scale_warmup=scale_warmup)


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """A line from 0 up to 1 over `t_warmup`, then half a cosine to `alpha_f`, reached at `t_max` and kept.

    Args:
        t_warmup: The length of the warmup.
        t_max: The end of the cosine, counted from the start of training.
        alpha_f: The multiplier from `t_max` on.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        t_max: TimeInput = "1dur",
        *,
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup=scale_warmup)
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        warmup, share = self._shares(state, ssr)
        return warmup if warmup < 1.0 else cosine(self.alpha_f, share)


class PolynomialWithWarmupScheduler(_WithWarmup):
    """A line from 0 up to 1 over `t_warmup`, then a polynomial decay to `alpha_f`, reached at `t_max`.

    Args:
        t_warmup: The length of the warmup.
        power: The exponent of the decay.
        t_max: The end of the decay, counted from the start of training.
        alpha_f: The multiplier from `t_max` on.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        power: float = 2.0,
        *,
        t_max: TimeInput = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup=scale_warmup)
        self.power = checked_number("power", power)
        self.alpha_f = checked_number("alpha_f", alpha_f)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        warmup, share = self._shares(state, ssr)
        return warmup if warmup < 1.0 else polynomial(self.alpha_f, self.power, share)


class MultiStepWithWarmupScheduler(Described):
    """A line from 0 up to 1 over `t_warmup`, then `gamma ** n` for `n` milestones reached.

    Args:
        t_warmup: The length of the warmup.
        milestones: Times counted from the start of training.
        gamma: The factor of each drop.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        milestones: TimeInput | Iterable[TimeInput],
        *,
        gamma: float = 0.1,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = warmup_time(t_warmup, self, stacklevel=2)
        self.milestones = as_times(milestones)
        self.gamma = checked_number("gamma", gamma)
        self.scale_warmup = scale_warmup

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        warmup = elapsed(state, self.t_warmup, ssr if self.scale_warmup else 1.0)
        return warmup if warmup < 1.0 else multi_step(self.milestones, self.gamma, state, ssr)
