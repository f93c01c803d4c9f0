"""Schedules of a profiler: its action in each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from hocket.trainer.checks import check_count
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.timestamp import Timestamp


class ProfilerAction(StrEnum):
    """The profiler's action during one batch."""

    SKIP = "skip"
    """Record nothing."""
    WARMUP = "warmup"
    """Run torch's profiler, and drop its records: its first batches are slower than the others."""
    ACTIVE = "active"
    """Record."""
    ACTIVE_AND_SAVE = "active_and_save"
    """Record, and write the trace at the end of the batch."""


class ProfiledState(Protocol):
    """The part of the trainer's state that a schedule reads."""

    @property
    def timestamp(self) -> Timestamp:
        """The training done so far."""

    @property
    def profiler(self) -> Any:
        """The running profiler."""


ProfilerSchedule = Callable[[ProfiledState], ProfilerAction]


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> ProfilerSchedule:
    """Return a schedule of cycles: `wait` batches skipped, `warmup` warmed up, `active` recorded and saved.

    Batches count from the first one that this process trains on, so a resumed run is profiled, too.

    Args:
        skip_first: Batches skipped before the first cycle.
        wait: Batches skipped at the start of each cycle.
        warmup: Batches of warmup in each cycle.
        active: Batches recorded in each cycle.
        repeat: The number of cycles; 0 for as many as there are batches.

    Raises:
        TrainerConfigError: If a number is not whole or negative, or `active` is not positive.
    """
    counts = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    for name, count in counts.items():
        check_count(name, count, least=int(name == "active"))
    return _Cycles(**counts)


@dataclass(frozen=True, slots=True)
class _Cycles:
    """The schedule of `cyclic_schedule`; a class, because a function within a function does not pickle."""

    skip_first: int
    wait: int
    warmup: int
    active: int
    repeat: int

    def __call__(self, state: ProfiledState) -> ProfilerAction:
        cycle = self.wait + self.warmup + self.active
        first = 0 if state.profiler is None else state.profiler.first_batch
        batch = state.timestamp.counts.batch - first - self.skip_first
        if batch < 0 or (self.repeat and batch >= cycle * self.repeat):
            return ProfilerAction.SKIP
        position = batch % cycle
        if position < self.wait:
            return ProfilerAction.SKIP
        if position < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.ACTIVE_AND_SAVE if position == cycle - 1 else ProfilerAction.ACTIVE


_OF_TORCH = {
    torch.profiler.ProfilerAction.NONE: ProfilerAction.SKIP,
    torch.profiler.ProfilerAction.WARMUP: ProfilerAction.WARMUP,
    torch.profiler.ProfilerAction.RECORD: ProfilerAction.ACTIVE,
    torch.profiler.ProfilerAction.RECORD_AND_SAVE: ProfilerAction.ACTIVE_AND_SAVE,
}
TORCH_ACTION = {ours: theirs for theirs, ours in _OF_TORCH.items()}


def _act_as_torch(
    schedule: Callable[[int], torch.profiler.ProfilerAction], state: ProfiledState
) -> ProfilerAction:
    first = 0 if state.profiler is None else state.profiler.first_batch
    return _OF_TORCH[schedule(state.timestamp.counts.batch - first)]


def as_schedule(schedule: Any) -> ProfilerSchedule:
    """Return a schedule of the trainer's state, also for one that `torch.profiler.schedule` made.

    Raises:
        TrainerConfigError: If it is not callable.
    """
    if not callable(schedule):
        raise TrainerConfigError(
            f"`schedule` is `{schedule!r}`; expected a function of the state, such as `cyclic_schedule(…)`, "
            "or a schedule of torch's profiler"
        )
    if getattr(schedule, "__module__", "").startswith("torch.profiler"):
        return functools.partial(_act_as_torch, schedule)
    own_schedule: ProfilerSchedule = schedule
    return own_schedule
