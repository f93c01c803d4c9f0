"""Schedules that begin with a straight line from 0, the warmup, and go on with another schedule after it."""

from __future__ import annotations

import warnings

from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.optim.schedulers import ScheduledState, cosine, linear, resolve
from hocket.trainer.time import TimeInput, ensure_time
from hocket.trainer.timestamp import count_in


class _WithWarmup:
    """The times of a schedule with warmup.

    The warmup rises from 0 to what the schedule after it starts at; that schedule then runs over what is left
    until `t_max`: its share is (t - t_warmup) / (t_max - t_warmup).
    """

    def __init__(self, t_warmup: TimeInput, t_max: TimeInput, *, scale_warmup: bool) -> None:
        self.t_warmup = ensure_time(t_warmup)
        self.t_max = ensure_time(t_max)
        self.scale_warmup = scale_warmup
        if self.t_warmup.value < 0:
            raise TimeValueError(f"a warmup of `{self.t_warmup}` is none; expected a time of zero or more")
        if self.t_warmup.value == 0:
            warnings.warn(
                f"`{type(self).__name__}` has a warmup of zero and starts at the full learning rate; "
                "the scheduler of the same name without warmup says so",
                stacklevel=3,
            )

    def _shares(self, state: ScheduledState, ssr: float) -> tuple[float, float]:
        """The shares that have passed of the warmup and of what comes after it, each 0 to 1."""
        warmup, unit = resolve(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        end, end_unit = resolve(self.t_max, state, ssr)
        if unit is not end_unit:
            raise TimeUnitError(
                f"`t_warmup` (`{self.t_warmup}`) is counted in `{unit.value}` and `t_max` (`{self.t_max}`) "
                f"in `{end_unit.value}`; state both in one unit, or one of them in `dur`"
            )
        now = count_in(state.timestamp.counts, unit)
        if now < warmup:
            return now / warmup, 0.0
        return 1.0, (min(1.0, (now - warmup) / (end - warmup)) if end > warmup else 1.0)


class LinearWithWarmupScheduler(_WithWarmup):
    """A line from 0 up to `alpha_i` over `t_warmup`, then a line to `alpha_f`, reached at `t_max` and kept.

    Args:
        t_warmup: How long the warmup takes.
        alpha_i: The multiplier at the end of the warmup.
        alpha_f: The multiplier from `t_max` on.
        t_max: Where the second line ends, counted from the start of the training.
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
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`."""
        warmup, share = self._shares(state, ssr)
        return self.alpha_i * warmup if warmup < 1.0 else linear(self.alpha_i, self.alpha_f, share)


class ConstantWithWarmupScheduler(LinearWithWarmupScheduler):
    """A line from 0 up to `alpha` over `t_warmup`, then that constant.

    Args:
        t_warmup: How long the warmup takes.
        alpha: The multiplier from the end of the warmup on.
        t_max: Taken for symmetry with the others; the multiplier does not change there.
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
        super().__init__(t_warmup, alpha, alpha_f=alpha, t_max=t_max, scale_warmup=scale_warmup)


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """A line from 0 up to 1 over `t_warmup`, then half a cosine to `alpha_f`, reached at `t_max` and kept.

    Args:
        t_warmup: How long the warmup takes.
        t_max: Where the cosine ends, counted from the start of the training.
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
        self.alpha_f = alpha_f

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`."""
        warmup, share = self._shares(state, ssr)
        return warmup if warmup < 1.0 else cosine(self.alpha_f, share)
