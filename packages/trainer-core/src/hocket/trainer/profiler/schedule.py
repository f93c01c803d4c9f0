"""Schedules of a profiler: its action in each batch."""

from __future__ import annotations

from collections.abc import Callable
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
    cycle = wait + warmup + active

    def action(state: ProfiledState) -> ProfilerAction:
        first = 0 if state.profiler is None else state.profiler.first_batch
        batch = state.timestamp.counts.batch - first - skip_first
        if batch < 0 or (repeat and batch >= cycle * repeat):
            return ProfilerAction.SKIP
        position = batch % cycle
        if position < wait:
            return ProfilerAction.SKIP
        if position < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.ACTIVE_AND_SAVE if position == cycle - 1 else ProfilerAction.ACTIVE

    return action


_OF_TORCH = {
    torch.profiler.ProfilerAction.NONE: ProfilerAction.SKIP,
    torch.profiler.ProfilerAction.WARMUP: ProfilerAction.WARMUP,
    torch.profiler.ProfilerAction.RECORD: ProfilerAction.ACTIVE,
    torch.profiler.ProfilerAction.RECORD_AND_SAVE: ProfilerAction.ACTIVE_AND_SAVE,
}
TORCH_ACTION = {ours: theirs for theirs, ours in _OF_TORCH.items()}


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

        def action(state: ProfiledState) -> ProfilerAction:
            first = 0 if state.profiler is None else state.profiler.first_batch
            return _OF_TORCH[schedule(state.timestamp.counts.batch - first)]

        return action
    own_schedule: ProfilerSchedule = schedule
    return own_schedule
