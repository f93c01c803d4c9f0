"""`every(interval)`: a function that is true once in each interval of training."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol, TypeAlias

from hocket.trainer.errors import TimeUnitError, TimeValueError
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time
from hocket.trainer.timestamp import Counts, Timestamp, count_in


class _ClockedState(Protocol):
    """The attributes of the state that an interval reads."""

    @property
    def timestamp(self) -> Timestamp: ...
    @property
    def previous_timestamp(self) -> Timestamp: ...
    @property
    def max_duration(self) -> Time | None: ...
    @property
    def dataloader_len(self) -> Time | int | None: ...


IsTime: TypeAlias = Callable[[Any, Any], bool]
"""`(state, event) -> bool`: whether it is time now."""

# The kind of event after which a unit's count has changed; `batch` for all other units.
_SEEN_AFTER = {TimeUnit.EPOCH: "epoch", TimeUnit.ITERATION: "iteration"}


def every(
    interval: TimeInput | IsTime,
    *,
    checkpoint_events: bool = False,
    include_end_of_training: bool = False,
) -> IsTime:
    """Make a callable `(state, event) -> bool` that is true once each `interval` of training.

    The callable compares `state.timestamp` with `state.previous_timestamp`, the timestamp before the step, so
    that a resumed run gets the same results. Intervals of epochs and iterations are checked when one has
    ended, all others after each batch. An interval of samples or tokens that ends in the middle of a batch
    counts as ended at the end of that batch.

    Args:
        interval: A number of epochs, a time string, a `Time`, or a callable, which is returned as it is.
        checkpoint_events: Return True at the `*_CHECKPOINT` events of batch, epoch and iteration, not at
            `*_END`.
        include_end_of_training: Return True also when the training's duration is reached, unless the callable
            has just been true for the same batch.

    Raises:
        TimeValueError: If `interval` is no time, or not positive.
    """
    if callable(interval):
        return interval
    return _EveryInterval(
        ensure_time(interval, TimeUnit.EPOCH),
        suffix="_checkpoint" if checkpoint_events else "_end",
        include_end_of_training=include_end_of_training,
    )


class _EveryInterval:
    """The callable that `every` makes."""

    def __init__(self, interval: Time, *, suffix: str, include_end_of_training: bool) -> None:
        if interval.value <= 0:
            raise TimeValueError(
                f"an interval of `{interval}` never ends; expected one above zero, such as `1ep`"
            )
        self.interval = interval
        self.include_end_of_training = include_end_of_training
        self._event = _SEEN_AFTER.get(interval.unit, "batch") + suffix
        self._events = frozenset(kind + suffix for kind in ("batch", "epoch", "iteration"))
        # Prevents a second True for one batch, at the end of its epoch or of the training.
        self._last: Counts | None = None

    def __call__(self, state: _ClockedState, event: Enum) -> bool:
        name = event.value
        if name not in self._events:
            return False
        if not (
            (name == self._event and self._is_crossed(state))
            or (self.include_end_of_training and _is_over(state))
        ):
            return False
        now = state.timestamp.counts
        last, self._last = self._last, now
        return last is None or (last.batch, last.sample, last.total_wct) != (
            now.batch,
            now.sample,
            now.total_wct,
        )

    def _is_crossed(self, state: _ClockedState) -> bool:
        before, now = state.previous_timestamp.counts, state.timestamp.counts
        if self.interval.unit is TimeUnit.DURATION:
            share = self.interval.value
            return _parts(share_done(state, before), share) != _parts(share_done(state, now), share)
        length, unit = int(self.interval.value), self.interval.unit
        return count_in(before, unit) // length != count_in(now, unit) // length

    def __repr__(self) -> str:
        return f"every({str(self.interval)!r})"


def _parts(progress: float, share: float) -> int:
    # The epsilon absorbs rounding: 3 of 30 batches must count as a share of 0.1.
    return int(progress / share + 1e-9)


def share_done(state: _ClockedState, counts: Counts) -> float:
    """Return the share of the training done at `counts`, from 0 to 1; an epoch in progress counts by batches.

    Raises:
        TimeUnitError: If `max_duration` is not set, or counts epochs of an unknown length.
    """
    duration = state.max_duration
    if duration is None:
        raise TimeUnitError(
            "an interval in `dur` needs `max_duration`; set it, or state the interval in `ba` or `ep`"
        )
    done: float = count_in(counts, duration.unit)
    if duration.unit is TimeUnit.EPOCH:
        if state.dataloader_len is None:
            raise TimeUnitError(
                "an interval in `dur` with `max_duration` in `ep` needs the number of batches an epoch has, "
                "and the data loader has no length; state `max_duration` in `ba`, or the interval in `ba`"
            )
        done += counts.batch_in_epoch / int(state.dataloader_len)
    return done / duration.value


def _is_over(state: _ClockedState) -> bool:
    duration = state.max_duration
    return duration is not None and count_in(state.timestamp.counts, duration.unit) >= duration.value
