"""Support for torch's `ReduceLROnPlateau`, which steps with a metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hocket.trainer.checks import Described
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.torch_schedulers import (
    load_torch_scheduler_state,
    set_rate,
    share_rates,
    torch_scheduler_state,
)


class MetricScheduler(Described):
    """A `ReduceLROnPlateau` and the metric that it steps with.

    It steps after each evaluation of the metric within a fit, except one at the fit's end that is out of its
    interval; for a metric of the training, after each epoch. The metric is then read from the device. Other
    schedules multiply the rates that it sets.

    Args:
        scheduler: The scheduler. Its `mode` says whether less or more of the metric is better.
        metric: The metric's name in the log, such as `"metrics/eval/Loss"`.

    Raises:
        TrainerConfigError: If the scheduler is no `ReduceLROnPlateau`.

    Example:
        >>> plateau = ReduceLROnPlateau(optimizer, mode="max", patience=2)
        >>> Trainer(optimizers=optimizer, schedulers=MetricScheduler(plateau, "metrics/eval/Accuracy"), ...)
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            raise TrainerConfigError(
                f"`MetricScheduler` got a `{type(scheduler).__name__}`; expected torch's "
                "`ReduceLROnPlateau`. Pass other schedulers to the trainer as they are"
            )
        self.scheduler = scheduler
        self.metric = metric

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose rates are set."""
        return self.scheduler.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, such as the best value so far."""
        return torch_scheduler_state(self.scheduler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        load_torch_scheduler_state(self.scheduler, state)


def step_metric_schedulers(schedulers: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Step the schedulers whose metrics have new values. Called on every rank, with the values of all ranks.

    Args:
        schedulers: The schedulers of the run.
        values: New values of metrics, by their names in the log.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, MetricScheduler) and scheduler.metric in values:
            of_optimizer = torch_schedulers_of(schedulers, scheduler.optimizer)
            is_multiplied = any(not isinstance(one, (LRScheduler, MetricScheduler)) for one in schedulers)
            _step(scheduler.scheduler, values[scheduler.metric], of_optimizer, is_multiplied=is_multiplied)


def _step(
    plateau: ReduceLROnPlateau, value: Any, schedulers: Sequence[LRScheduler], *, is_multiplied: bool
) -> None:
    groups = plateau.optimizer.param_groups
    shown = [group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"] for group in groups]
    if is_multiplied:
        # The scheduler changes the rate that torch's schedulers have set, without the multipliers.
        for group, rate in zip(groups, schedulers[-1].get_last_lr(), strict=True):
            set_rate(group, rate)
    plateau.step(value)
    share_rates(schedulers)
    if is_multiplied:
        for group, rate in zip(groups, shown, strict=True):
            set_rate(group, rate)  # the next batch has the new one


def torch_schedulers_of(schedulers: Iterable[Any], optimizer: Optimizer) -> list[LRScheduler]:
    """Return torch's schedulers of one optimizer, without their wrappers, in the given order."""
    plain = (one.scheduler if isinstance(one, MetricScheduler) else one for one in schedulers)
    return [one for one in plain if isinstance(one, LRScheduler) and one.optimizer is optimizer]


def check_metrics(schedulers: Iterable[Any], names: Sequence[str]) -> None:
    """Refuse a `MetricScheduler` of a metric that the run does not have.

    Args:
        schedulers: The schedulers of the run.
        names: The names of the run's metrics in the log; a metric with a dict as its value has further names
            below its own.

    Raises:
        TrainerConfigError: If there is no such metric.
    """
    for one in schedulers:
        if isinstance(one, MetricScheduler) and not any(
            one.metric == name or one.metric.startswith(f"{name}/") for name in names
        ):
            known = ", ".join(f"`{name}`" for name in names) or "none"
            raise TrainerConfigError(
                f"a `MetricScheduler` steps with `{one.metric}`, which this run does not measure; it has: "
                f"{known}"
            )
