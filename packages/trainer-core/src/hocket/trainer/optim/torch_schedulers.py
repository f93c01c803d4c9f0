"""Support for torch's own `lr_scheduler` classes: stepping, stretching and checkpoint state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.timestamp import Timestamp

# Attributes that count steps, by class. A stretched schedule multiplies them.
_LENGTHS: dict[type[LRScheduler], tuple[str, ...]] = {
    lr_scheduler.StepLR: ("step_size",),
    lr_scheduler.ConstantLR: ("total_iters",),
    lr_scheduler.LinearLR: ("total_iters",),
    lr_scheduler.PolynomialLR: ("total_iters",),
    lr_scheduler.CosineAnnealingLR: ("T_max",),
    lr_scheduler.CosineAnnealingWarmRestarts: ("T_0", "T_i"),
}
# An entry of the scheduler's `__dict__`, so torch's own `state_dict` stores it.
_STEPPED_AT = "hocket_stepped_at"


class _TimedState(Protocol):
    @property
    def timestamp(self) -> Timestamp: ...


def check_torch_scheduler(scheduler: LRScheduler) -> None:
    """Refuse `ReduceLROnPlateau`, which needs a metric with every step.

    Raises:
        TrainerConfigError: If the scheduler is a `ReduceLROnPlateau`.
    """
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise TrainerConfigError(
            "`ReduceLROnPlateau` steps with a metric; name it: `MetricScheduler(scheduler, "
            "'metrics/eval/Loss')` of `hocket.trainer.optim`"
        )


def step_torch_schedulers(
    schedulers: Sequence[LRScheduler], state: _TimedState, *, every_batch: bool, is_multiplied: bool
) -> None:
    """Step the schedulers of one optimizer if a batch (or an epoch) was completed since the last call.

    Called before a batch. A second call at the same time changes nothing.

    Args:
        schedulers: torch's schedulers, in the order in which they were made.
        state: Supplies the time.
        every_batch: Count batches; otherwise epochs.
        is_multiplied: Whether other schedules multiply the learning rates that these schedulers set.
    """
    counts = state.timestamp.counts
    now = counts.batch if every_batch else counts.epoch
    timed = [one for one in schedulers if not isinstance(one, lr_scheduler.ReduceLROnPlateau)]
    due = [scheduler for scheduler in timed if vars(scheduler).get(_STEPPED_AT, now) != now]
    if due and is_multiplied:
        # torch's schedulers compute the next rate from the last one, which must be their own.
        last = schedulers[-1]
        for group, rate in zip(last.optimizer.param_groups, last.get_last_lr(), strict=True):
            set_rate(group, rate)
    for scheduler in due:
        scheduler.step()
    if due and len(timed) < len(schedulers):
        share_rates(schedulers)
    for scheduler in timed:
        vars(scheduler)[_STEPPED_AT] = now


def hold_torch_scheduler(scheduler: LRScheduler, *, batch: int) -> None:
    """Leave out the step after a batch, whose update did not happen.

    Args:
        scheduler: A scheduler that steps with each batch.
        batch: The number of batches when the batch has ended.
    """
    if _STEPPED_AT in vars(scheduler):
        vars(scheduler)[_STEPPED_AT] = batch


def share_rates(schedulers: Sequence[LRScheduler]) -> None:
    """Give all of an optimizer's schedulers the rates that the last step has set, as their own."""
    for scheduler in schedulers:
        rates = (group["lr"] for group in scheduler.optimizer.param_groups)
        scheduler._last_lr = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set the learning rate of a group; a rate that is a tensor is filled in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def scale_torch_scheduler(scheduler: LRScheduler, ratio: float) -> None:
    """Stretch a scheduler that has not stepped yet to `ratio` times its length, in place.

    Raises:
        TrainerConfigError: If the scheduler is of a class whose lengths are not listed here.
    """
    if ratio == 1.0:
        return
    if isinstance(scheduler, lr_scheduler.ExponentialLR):
        scheduler.gamma **= 1.0 / ratio
    elif isinstance(scheduler, lr_scheduler.MultiStepLR):
        scaled_milestones: Counter[int] = Counter()
        for milestone, times in scheduler.milestones.items():
            scaled_milestones[int(milestone * ratio)] += times
        scheduler.milestones = scaled_milestones
    elif type(scheduler) in _LENGTHS:
        for name in _LENGTHS[type(scheduler)]:
            setattr(scheduler, name, max(1, int(getattr(scheduler, name) * ratio)))
    else:
        raise TrainerConfigError(
            f"`scale_schedule_ratio` is {ratio}, and `{type(scheduler).__name__}` cannot be stretched; "
            "make it with the lengths that you want, or use a schedule of `hocket.trainer.optim`"
        )


def torch_scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a scheduler's state in plain values, without the functions that some schedulers store."""
    return {
        name: plain for name, value in scheduler.state_dict().items() if (plain := _plain(value)) is not _SKIP
    }


def load_torch_scheduler_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Restore a state of `torch_scheduler_state`; values that it left out stay as the scheduler has them."""
    current_state = scheduler.state_dict()
    scheduler.load_state_dict(
        {**current_state, **{name: _like(value, current_state.get(name)) for name, value in state.items()}}
    )


def unsaved_values(scheduler: LRScheduler) -> list[str]:
    """Return the names of the values of a scheduler's state that `torch_scheduler_state` leaves out.

    Functions are left out on purpose, because a new scheduler has them.
    """
    data = (torch.Tensor, set, frozenset, deque, Number)
    return [
        name
        for name, value in scheduler.state_dict().items()
        if _plain(value) is _SKIP and (isinstance(value, data) or hasattr(value, "tobytes"))
    ]


_SKIP = object()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _SKIP}
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a number of numpy
        return value.item()
    if isinstance(value, (list, tuple)):
        return [None if (plain := _plain(item)) is _SKIP else plain for item in value]
    return _SKIP


def _like(saved: Any, current: Any) -> Any:
    """Return a saved value with the types of keys and containers that the scheduler uses."""
    if isinstance(current, Counter):
        return Counter({int(key): number for key, number in saved.items()})
    if isinstance(current, Mapping) and isinstance(saved, Mapping):
        return {**current, **{key: _like(item, current.get(key)) for key, item in saved.items()}}
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)) and len(current) == len(saved):
        return type(current)([_like(item, old) for item, old in zip(saved, current, strict=True)])
    return saved
