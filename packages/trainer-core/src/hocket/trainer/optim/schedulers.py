"""Schedules without warmup: stateless callables from training time to a multiplier of the learning rate.

A schedule reads the time from the state each batch and keeps nothing, so a resumed run has the same learning
rates as one that never stopped, and a changed `max_duration` takes effect at once.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from hocket.trainer.errors import TimeUnitError
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time, floor_of_product
from hocket.trainer.timestamp import Timestamp, count_in


class ScheduledState(Protocol):
    """What a schedule reads of the state."""

    @property
    def timestamp(self) -> Timestamp:
        """How much has been trained on."""

    @property
    def max_duration(self) -> Time | None:
        """When the training ends."""

    @property
    def dataloader_len(self) -> Time | int | None:
        """Batches in an epoch, where known."""


@runtime_checkable
class Scheduler(Protocol):
    """A schedule: `(state, ssr) -> multiplier` of every group's initial learning rate.

    Any callable of this shape is one. Several given to a trainer multiply.
    """

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`; the scale schedule ratio `ssr` stretches the schedule."""


def resolve(time: Time, state: ScheduledState, ssr: float) -> tuple[int, TimeUnit]:
    """Turn a schedule's time into a number in a unit that advances with every batch.

    `dur` becomes its share of `max_duration`, epochs become batches where the data loader has a length. `ssr`
    stretches every unit but `dur`, whose `max_duration` is already stretched.

    Raises:
        TimeUnitError: If the time cannot be resolved: seconds, or `dur` without a `max_duration`, or epochs
            with a data loader that has no length.
    """
    if time.unit is TimeUnit.SECOND:
        raise TimeUnitError(
            f"a schedule cannot follow the clock: with `{time}`, learning rates would depend on "
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
            f"`{time}` cannot be told in batches, since the data loader has no length; "
            "state it in `ba`, `sp` or `tok`"
        )
    return int(time.value) * int(state.dataloader_len), TimeUnit.BATCH


def elapsed(state: ScheduledState, time: Time, ssr: float) -> float:
    """The share of `time` that has passed, 0 to 1; 1 for a `time` of nothing."""
    length, unit = resolve(time, state, ssr)
    return min(1.0, count_in(state.timestamp.counts, unit) / length) if length > 0 else 1.0


def linear(start: float, end: float, share: float) -> float:
    """The value `share` of the way from `start` to `end`."""
    return start + (end - start) * share


def cosine(alpha_f: float, share: float) -> float:
    """The value `share` of the way down half a cosine from 1 to `alpha_f`."""
    return alpha_f + (1.0 - alpha_f) * 0.5 * (1.0 + math.cos(math.pi * share))


class ConstantScheduler:
    """A constant multiplier `alpha` until `t_max`, and 1 from there on.

    Args:
        alpha: The multiplier.
        t_max: Until when.
    """

    def __init__(self, alpha: float = 1.0, t_max: TimeInput = "1dur") -> None:
        self.alpha = alpha
        self.t_max = ensure_time(t_max)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`."""
        return self.alpha if elapsed(state, self.t_max, ssr) < 1.0 else 1.0


class LinearScheduler:
    """A straight line from `alpha_i` to `alpha_f`, reached at `t_max` and kept.

    Args:
        alpha_i: The multiplier at the start.
        alpha_f: The multiplier from `t_max` on.
        t_max: Where the line ends.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, *, t_max: TimeInput = "1dur") -> None:
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f
        self.t_max = ensure_time(t_max)

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`."""
        return linear(self.alpha_i, self.alpha_f, elapsed(state, self.t_max, ssr))


class CosineAnnealingScheduler:
    """Half a cosine from 1 down to `alpha_f`, reached at `t_max` and kept.

    Args:
        t_max: Where the cosine ends.
        alpha_f: The multiplier from `t_max` on.

    Source: Loshchilov and Hutter, SGDR, 2017, equation 5, one cycle.
    """

    def __init__(self, t_max: TimeInput = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = ensure_time(t_max)
        self.alpha_f = alpha_f

    def __call__(self, state: ScheduledState, ssr: float = 1.0) -> float:
        """The multiplier at `state.timestamp`."""
        return cosine(self.alpha_f, elapsed(state, self.t_max, ssr))
