"""`Run`: the parts that a fit runs with, and the functions that the loop calls around a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.engine.engine import Engine
from hocket.trainer.evaluation.evaluation import EvaluationLoop
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.loop.nonfinite import NonFiniteGuard
from hocket.trainer.process.clock import TrainingClock
from hocket.trainer.ranks.step_sync import GlobalStep, StepSync
from hocket.trainer.state import State
from hocket.trainer.step.step import StepContext, mean_over_ranks

# ruff: noqa: E701 - an event is one line, as in the training loop
# fmt: off

LOSS = "loss/train/total"
"""The name of the mean loss in the log."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts that a fit runs with."""

    state: State
    engine: Engine
    logger: Logger
    loader: TrainLoader
    context: StepContext
    sync: StepSync
    evaluation: EvaluationLoop
    checkpointer: Checkpointer | None
    guard: NonFiniteGuard
    is_loss_logged: bool
    """Whether any rank logs; the loss is reduced over ranks only then."""
    log_every: int = 1
    """Batches between two logged losses."""
    gc_interval: int | None = None
    """Batches between two collections of Python's garbage; None if the loop runs none."""
    prefetches: bool = True
    """Whether batches are fetched ahead of their step."""
    clock: TrainingClock
    """The clock of training time, which stops during evaluation."""
    is_preempted: Callable[[], bool]
    """Returns whether SIGTERM ended the training. Collective."""
    clock_s: float = 0.0
    """The time at which the last step ended, by rank 0's `clock`."""


def evaluate_if_due(run: Run, event: Event) -> None:
    """Run the evaluators that are due, and exclude their time from the training clock."""
    run.clock.exclude(run.evaluation.run_if_due(event))


def finish_batch(run: Run) -> None:
    """Evaluate, save and collect garbage after `BATCH_END`, where each is due; finalize an agreed stop."""
    state, checkpointer, stop = run.state, run.checkpointer, run.state.stop
    if state.evaluators: evaluate_if_due(run, Event.BATCH_END)
    if run.engine.on.batch_checkpoint: run.engine.fire(Event.BATCH_CHECKPOINT)
    if checkpointer: checkpointer.save_if_due(Event.BATCH_CHECKPOINT)
    if run.gc_interval and state.counts.batch % run.gc_interval == 0: gc.collect()
    if stop.is_agreed and not run.loader.has_batch_ahead: stop.finalize()


def log_loss(run: Run, loss: torch.Tensor, step: GlobalStep, batch: int) -> None:
    """Log the mean loss of the global batch, and its parts. Collective on several ranks."""
    context = run.context
    values = {LOSS: mean_over_ranks(context, loss)}
    values |= context.loss_parts.take(step.weight, run.state.parallelism)
    run.logger.log_metrics(values, batch)
