"""The computation of a batch's learning rates from the schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.checks import refuse_class
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.metric_scheduler import MetricScheduler, torch_schedulers_of
from hocket.trainer.optim.schedulers import ForOptimizer, ScheduledState, Scheduler
from hocket.trainer.optim.torch_schedulers import (
    check_torch_scheduler,
    hold_torch_scheduler,
    scale_torch_scheduler,
    set_rate,
    step_torch_schedulers,
)
from hocket.trainer.time import Time
from hocket.trainer.timestamp import Timestamp


class _RateState(ScheduledState, Protocol):
    """The part of the trainer's state from which learning rates are computed."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers with their parameter groups."""

    @property
    def schedulers(self) -> Sequence[Scheduler | LRScheduler | MetricScheduler]:
        """The schedules; their multipliers are multiplied with each other."""

    @property
    def scale_schedule_ratio(self) -> float:
        """The factor by which schedules are stretched."""

    @property
    def step_schedulers_every_batch(self) -> bool | None:
        """Whether schedules advance with each batch, or with each epoch; None for each kind's default."""


def prepare_schedulers(
    schedulers: Sequence[Scheduler | LRScheduler | MetricScheduler],
    optimizers: Sequence[Optimizer],
    *,
    ratio: float,
) -> None:
    """Check schedules, stretch torch's, and store the initial learning rates in the parameter groups.

    Called once for each list of schedules, before the first batch.

    Raises:
        TrainerConfigError: If a schedule is not callable, needs a metric, or cannot be stretched; or if the
            ratio is not positive, or given without a schedule.
    """
    if not 0.0 < ratio < math.inf:
        raise TrainerConfigError(f"`scale_schedule_ratio` is {ratio}; expected a positive number")
    if ratio != 1.0 and not schedulers:
        raise TrainerConfigError(
            f"`scale_schedule_ratio` is {ratio}, and there are no `schedulers` to stretch; pass them, or "
            "change `max_duration` instead"
        )
    for scheduler in schedulers:
        refuse_class("schedulers", scheduler)
        if isinstance(scheduler, LRScheduler):
            check_torch_scheduler(scheduler)
            scale_torch_scheduler(scheduler, ratio)
        elif isinstance(scheduler, MetricScheduler):
            scale_torch_scheduler(scheduler.scheduler, ratio)
        elif not callable(scheduler):
            raise TrainerConfigError(
                f"`schedulers` has a `{type(scheduler).__name__}`; expected callables `(state, ssr=1.0) -> "
                "multiplier`, such as those of `hocket.trainer.optim`, or torch's `LRScheduler`s"
            )
    if schedulers:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if group.get("lr") is None:
                    raise TrainerConfigError(
                        f"`schedulers` set learning rates, and `{type(optimizer).__name__}` has a group of "
                        "parameters without one, `lr`; leave `schedulers` out, or give the group a rate"
                    )
                group.setdefault("initial_lr", float(group["lr"]))


def apply_schedulers(state: _RateState, *, ssr: float | None = None) -> None:
    """Set every parameter group's `lr` for the batch that starts at the current time.

    The rate is `initial_lr` times the multipliers of all schedules that apply to the optimizer; for an
    optimizer with one of torch's schedulers it is the rate that the last of these gave, times the
    multipliers. Schedules advance with each batch and torch's schedulers with each epoch, unless
    `state.step_schedulers_every_batch` decides for both.

    A second call at the same time changes nothing. The device is never read: a rate that is a tensor (of a
    captured or compiled step) is filled in place, in order with the device's work.

    Args:
        state: The state with `optimizers`, `schedulers` and the time.
        ssr: The scale schedule ratio, instead of the state's.
    """
    if not state.schedulers:
        return
    ratio = state.scale_schedule_ratio if ssr is None else ssr
    every_batch = state.step_schedulers_every_batch
    schedule_state: Any = state if every_batch in (None, True) else _EpochStart(state)
    multiplier = 1.0
    own_multipliers: dict[int, float] = {}
    num_torch = 0
    for scheduler in state.schedulers:
        if isinstance(scheduler, ForOptimizer):
            key = id(scheduler.optimizer)
            own_multipliers[key] = own_multipliers.get(key, 1.0) * scheduler(schedule_state, ratio)
        elif isinstance(scheduler, (LRScheduler, MetricScheduler)):
            num_torch += 1
        else:
            multiplier *= scheduler(schedule_state, ratio)
    is_multiplied = num_torch < len(state.schedulers)
    for optimizer in state.optimizers:
        if num_torch and (own_schedulers := torch_schedulers_of(state.schedulers, optimizer)):
            step_torch_schedulers(
                own_schedulers, state, every_batch=bool(every_batch), is_multiplied=is_multiplied
            )
            if is_multiplied:
                total_multiplier = multiplier * own_multipliers.get(id(optimizer), 1.0)
                for group, rate in zip(optimizer.param_groups, own_schedulers[-1].get_last_lr(), strict=True):
                    set_rate(group, rate * total_multiplier)
            continue
        if is_multiplied:
            total_multiplier = multiplier * own_multipliers.get(id(optimizer), 1.0)
            for group in optimizer.param_groups:
                if "initial_lr" not in group:
                    # A tensor is read once here, at the first batch, and never again.
                    group["initial_lr"] = float(group["lr"])
                set_rate(group, group["initial_lr"] * total_multiplier)


def hold_schedulers(state: _RateState, has_skipped: Callable[[Optimizer], bool]) -> None:
    """Keep torch's schedulers that step with each batch from stepping after a batch without an update.

    Called after the update and before the time advances.

    Args:
        state: The state with the schedules and the time.
        has_skipped: Returns whether an optimizer did not step; called if a scheduler asks for it.
    """
    if not state.step_schedulers_every_batch:
        return
    held = [one for one in state.schedulers if isinstance(one, LRScheduler)]
    for optimizer in {id(one.optimizer): one.optimizer for one in held}.values():
        if has_skipped(optimizer):
            for scheduler in torch_schedulers_of(held, optimizer):
                hold_torch_scheduler(scheduler, batch=state.timestamp.counts.batch + 1)


class _EpochStart:
    """The state as it was at the start of the current epoch, for schedules that advance with each epoch."""

    def __init__(self, state: ScheduledState) -> None:
        counts = state.timestamp.counts
        self.max_duration: Time | None = state.max_duration
        self.dataloader_len = state.dataloader_len
        self.timestamp = Timestamp(
            iteration=counts.iteration,
            epoch=counts.epoch,
            batch=counts.batch - counts.batch_in_epoch,
            sample=counts.sample - counts.sample_in_epoch,
            token=counts.token - counts.token_in_epoch,
        )
