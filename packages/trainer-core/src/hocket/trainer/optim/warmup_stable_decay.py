"""The warmup-stable-decay schedule, whose decay can be started at any time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from hocket.trainer.checks import Described
from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.optim.schedulers import (
    ScheduledState,
    checked_number,
    cosine,
    linear,
    resolve,
    time_from_zero,
)
from hocket.trainer.optim.warmup import warmup_time
from hocket.trainer.time import Time, TimeInput, TimeUnit
from hocket.trainer.timestamp import Timestamp, count_in

Shape = Literal["linear", "cosine", "sqrt"]

_SHAPES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda alpha_f, share: linear(1.0, alpha_f, share),
    "cosine": cosine,
    "sqrt": lambda alpha_f, share: linear(1.0, alpha_f, math.sqrt(share)),
}


class _RunningState(Protocol):
    """The part of the trainer's state that `decay_now` reads and writes."""

    max_duration: Time | None
    dataloader_len: int | None

    @property
    def timestamp(self) -> Timestamp: ...


class WarmupStableDecayScheduler(Described):
    """A line from 0 up to 1, a constant phase, and a decay to `alpha_f` that ends at `t_max`.

    The learning rates before the decay do not depend on its start: a run whose `max_duration` is extended
    before then has the same rates as one that was planned longer. `decay_now` starts the decay early.

    Args:
        t_warmup: The length of the warmup.
        t_decay: The length of the decay.
        t_max: The end of the decay, counted from the start of training.
        alpha_f: The multiplier from the end of the decay on.
        decay: The shape of the decay: `"linear"`, `"cosine"`, or `"sqrt"` for `1 - sqrt(share)`.
        scale_warmup: Whether the scale schedule ratio stretches the warmup too.

    Raises:
        TimeValueError: If a time is negative, or `decay` is unknown.

    Source: Hu et al., MiniCPM, 2024, section 4; Hägele et al., Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations, 2024, equation 1 for `"sqrt"`.
    """

    def __init__(
        self,
        t_warmup: TimeInput,
        t_decay: TimeInput = "0.1dur",
        *,
        t_max: TimeInput = "1dur",
        alpha_f: float = 0.0,
        decay: Shape = "linear",
        scale_warmup: bool = False,
    ) -> None:
        if decay not in _SHAPES:
            shapes = ", ".join(f"`{shape}`" for shape in _SHAPES)
            raise TimeValueError(f"`decay` is `{decay}`; expected one of {shapes}")
        self.t_warmup = warmup_time(t_warmup, self, stacklevel=2)
        self.t_decay = time_from_zero("t_decay", t_decay)
        self.t_max = time_from_zero("t_max", t_max)
        self.alpha_f = checked_number("alpha_f", alpha_f)
        self.decay = decay
        self.scale_warmup = scale_warmup
        # Start, length and unit of a decay that `decay_now` started; None while `t_max` decides.
        self._early: tuple[int, int, TimeUnit] | None = None

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """Return the multiplier at `state.timestamp`."""
        warmup, unit = resolve(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        start, length, decay_unit = self._early or self._planned(state, ssr)
        counts = state.timestamp.counts
        rise = min(1.0, count_in(counts, unit) / warmup) if warmup > 0 else 1.0
        now = count_in(counts, decay_unit)
        if now < start:
            return rise
        share = min(1.0, (now - start) / length) if length > 0 else 1.0
        return rise * _SHAPES[self.decay](self.alpha_f, share)

    def decay_now(self, state: _RunningState, t_decay: TimeInput | None = None) -> Time:
        """Start the decay at the current time and end training when it is complete.

        Call it on every rank after the same batch. The start is stored in checkpoints. A resumed run takes
        `max_duration` from its own arguments: pass the returned time.

        Args:
            state: The trainer's state; its `max_duration` becomes the end of the decay.
            t_decay: The length of the decay instead of the schedule's own.

        Returns:
            The new `max_duration`.
        """
        length, unit = resolve(
            self.t_decay if t_decay is None else time_from_zero("t_decay", t_decay), state, 1.0
        )
        start = count_in(state.timestamp.counts, unit)
        self._early = (start, length, unit)
        state.max_duration = Time(start + length, unit)
        return state.max_duration

    def state_dict(self) -> dict[str, Any]:
        """Return the start, length and unit of a decay that `decay_now` started; empty otherwise."""
        if self._early is None:
            return {}
        start, length, unit = self._early
        return {"start": start, "length": length, "unit": unit.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._early = (state["start"], state["length"], TimeUnit(state["unit"])) if state else None

    def _planned(self, state: ScheduledState, ssr: float) -> tuple[int, int, TimeUnit]:
        length, unit = resolve(self.t_decay, state, ssr)
        end, end_unit = resolve(self.t_max, state, ssr)
        if unit is not end_unit:
            raise TimeUnitError(
                f"`t_decay` (`{self.t_decay}`) is counted in `{unit.value}` and `t_max` (`{self.t_max}`) in "
                f"`{end_unit.value}`; give both in one unit, or one of them in `dur`"
            )
        return end - length, length, unit
