"""Setting the learning rates of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from hocket.trainer.optim.schedulers import ScheduledState, Scheduler


class _State(ScheduledState, Protocol):
    """What is read of the state to set learning rates."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, each with its parameter groups."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """The schedules; their multipliers multiply."""


def apply_schedulers(state: _State, *, ssr: float = 1.0) -> None:
    """Set every parameter group's `lr` to its `initial_lr` times the schedules' multipliers at this time.

    Called before a step, it sets that step's learning rate; calling it again at the same time does no harm.
    A group without `initial_lr` gets its present `lr` as that. It never waits for the device: a learning rate
    that is a tensor (of a captured or compiled step) is filled in place, in order with the device's work.

    Args:
        state: Holds `optimizers`, `schedulers` and the time.
        ssr: The scale schedule ratio, which stretches the schedules.

    Raises:
        TypeError: If a schedule is one of torch's, which keep their own count.
    """
    if not state.schedulers:
        return
    multiplier = 1.0
    for scheduler in state.schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"`{type(scheduler).__name__}` is one of torch's schedulers, which count their own steps; "
                "expected a callable `(state, ssr=1.0) -> multiplier`, such as `LinearWithWarmupScheduler`"
            )
        multiplier *= scheduler(state, ssr)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            lr = group["lr"]
            is_tensor = isinstance(lr, torch.Tensor)
            if "initial_lr" not in group:
                # A tensor is read once here, at the first batch, and never again.
                group["initial_lr"] = float(lr)
            rate = group["initial_lr"] * multiplier
            if is_tensor:
                lr.fill_(rate)
            else:
                group["lr"] = rate
