"""What `Trainer.fit` prepares before the loop: schedules, the end of the run, the parts it runs with."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.arguments import as_list, scaled_duration
from hocket.trainer.errors import DurationReachedError, TrainerConfigError
from hocket.trainer.fit_run import Run
from hocket.trainer.nonfinite import NonFiniteGuard
from hocket.trainer.optim import prepare_schedulers
from hocket.trainer.parts import Parts
from hocket.trainer.run_summary import print_notices
from hocket.trainer.state import State
from hocket.trainer.train_loader import TrainLoader


def set_schedules(
    state: State,
    schedulers: Any,
    ratio: float | None,
    every_batch: bool | None,
    *,
    keeps_duration: bool,
) -> None:
    """Take what `fit` was given about schedules.

    Args:
        state: Of the run.
        schedulers: The new ones; None for those that there are.
        ratio: The factor by which schedules are stretched; None for the present one.
        every_batch: Whether they advance with each batch; None for no change.
        keeps_duration: Whether `max_duration` stays as it is, as `fit` was given another.

    Raises:
        TrainerConfigError: If torch's schedulers would have to be stretched while they run.
    """
    if every_batch is not None:
        state.step_schedulers_every_batch = every_batch
    if schedulers is None and ratio is None:
        return
    before = state.scale_schedule_ratio
    now = before if ratio is None else ratio
    if schedulers is not None:
        prepare_schedulers(as_list(schedulers), state.optimizers, ratio=now)
        state.schedulers = as_list(schedulers)
    elif any(isinstance(scheduler, LRScheduler) for scheduler in state.schedulers):
        raise TrainerConfigError(
            "torch's schedulers cannot be stretched once they run; pass new ones as `fit(schedulers=…)` "
            "beside `scale_schedule_ratio`"
        )
    else:
        prepare_schedulers(state.schedulers, state.optimizers, ratio=now)
    state.scale_schedule_ratio = now
    if not keeps_duration and state.max_duration is not None:
        state.max_duration = scaled_duration(state.max_duration, now / before)


def is_finished(parts: Parts) -> bool:
    """Whether a run that was resumed has nothing left to train, which is said; clears an earlier stop.

    Raises:
        DurationReachedError: If a run that was not resumed has nothing left.
    """
    state = parts.state
    state.stop.clear()
    if not state.is_over():
        return False
    assert state.max_duration is not None
    done = state.timestamp.get(state.max_duration.unit)
    if parts.is_own_checkpoint:
        notices = [
            *parts.notices,
            f"the run has trained for `{done}` of `{state.max_duration}`: it is finished",
        ]
        print_notices(state, notices)
        parts.notices = []
        return True
    raise DurationReachedError(
        f"the run has trained for `{done}`, and `max_duration` is `{state.max_duration}`; pass a "
        f"longer one, or "
        "`fit(duration=…)` for how much more"
    )


def make_run(parts: Parts, loader: TrainLoader) -> Run:
    """Put the parts of a fit together. Collective."""
    state, logger = parts.state, parts.logger
    is_first = state.parallelism.data_parallel[0] == 0
    (clock_s, num_destinations) = parts.sync.sum_of(
        parts.clock.now() if is_first else 0.0, len(logger.destinations)
    )
    guard = NonFiniteGuard(parts.config.numerics.nonfinite_loss, state, parts.sync, loader)
    if parts.checkpointer is not None:
        parts.checkpointer.before_save = guard.settle
    return Run(
        guard=guard,
        state=state,
        engine=parts.engine,
        logger=logger,
        loader=loader,
        context=parts.context,
        sync=parts.sync,
        evaluation=parts.evaluation,
        checkpointer=parts.checkpointer,
        is_loss_logged=num_destinations > 0,
        log_every=parts.config.log.log_every,
        gc_interval=parts.config.numerics.gc_interval,
        prefetches=parts.config.data.prefetch_depth > 0,
        clock=parts.clock,
        clock_s=clock_s,
    )
