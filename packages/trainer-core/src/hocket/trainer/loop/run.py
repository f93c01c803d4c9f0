"""`Run`: the parts of a run, and the functions that the loop calls around a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.checkpoint.ephemeral import MemoryCopies
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.engine.engine import Engine
from hocket.trainer.evaluation.evaluation import EvaluationLoop
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.loss_journal import LossJournal
from hocket.trainer.loop.nonfinite import NonFiniteGuard
from hocket.trainer.loop.preemption import StopNotice
from hocket.trainer.precision import Precision
from hocket.trainer.process.clock import TrainingClock
from hocket.trainer.protocols import CheckpointStore
from hocket.trainer.ranks.step_sync import GlobalStep, StepSync
from hocket.trainer.state import State
from hocket.trainer.step.microbatch_step import AutoMicrobatchStep
from hocket.trainer.step.step import StepContext, mean_over_ranks

# ruff: noqa: E701 - an event is one line, as in the training loop
# fmt: off

LOSS = "loss/train/total"
"""The name of the mean loss in the log."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run, wired together; the setup of a fit replaces some of them."""

    state: State
    engine: Engine
    logger: Logger
    sync: StepSync
    precision: Precision
    context: StepContext
    run_state: CheckpointState
    evaluation: EvaluationLoop
    store: CheckpointStore | None
    """The store of `save_folder`, or of the folder that contains `load_path`."""
    copies: MemoryCopies | None = None
    """The copies in memory, from which a restarted attempt of the job goes on."""
    checkpointer: Checkpointer | None
    clock: TrainingClock = field(default_factory=TrainingClock)
    """The clock of training time, which stops during evaluation."""
    clock_s: float = 0.0
    """The time up to which the steps are counted, by rank 0's `clock`."""
    loader: TrainLoader | None = None
    data_source: str = ""
    """The source of the data's rank and world size, in words."""
    notices: list[str] = field(default_factory=list)
    """Sentences for the user, printed when `fit` starts."""
    is_own_checkpoint: bool = False
    """Whether the run continues from a checkpoint that `autoresume` found."""
    auto_step: AutoMicrobatchStep | None = None
    """The step that finds the microbatch size; None if the size is fixed."""
    microbatch_limit: int | None = None
    """The most samples in a microbatch, after an attempt that ran out of memory."""
    guard: NonFiniteGuard | None = None
    """The check of each step's loss in the present fit."""
    check_loss: Callable[[torch.Tensor], object] | None = None
    """Compares the loss of the first batch between ranks that share their data; None afterwards."""
    is_loss_logged: bool = False
    """Whether any rank logs; the loss is reduced over ranks only then."""
    log_every: int = 1
    """Batches between two logged losses."""
    losses: LossJournal | None = None
    """The losses that checkpoints record; None in a run that saves none."""
    gc_interval: int | None = None
    """Batches between two collections of Python's garbage; None if the loop runs none."""
    prefetches: bool = True
    """Whether batches are fetched ahead of their step."""
    notice: StopNotice = field(default_factory=StopNotice)
    """The handler of SIGTERM and other notices of the end."""

    def is_preempted(self) -> bool:
        """Return whether a notice of the end, such as SIGTERM, ended the training. Collective."""
        return self.notice.has_ended_training(self.sync)


def evaluate_if_due(run: Run, event: Event) -> None:
    """Run the evaluators that are due, and exclude their time from the training clock."""
    run.clock.exclude(run.evaluation.run_if_due(event))


def finish_batch(run: Run) -> None:
    """Evaluate, save and collect garbage after `BATCH_END`, where each is due; finalize an agreed stop."""
    state, checkpointer, stop = run.state, run.checkpointer, run.state.stop
    assert run.loader is not None
    if state.evaluators: evaluate_if_due(run, Event.BATCH_END)
    if run.engine.on.batch_checkpoint: run.engine.fire(Event.BATCH_CHECKPOINT)
    if checkpointer: checkpointer.save_if_due(Event.BATCH_CHECKPOINT)
    if run.gc_interval and state.counts.batch % run.gc_interval == 0: gc.collect()
    if stop.is_agreed and not run.loader.has_batch_ahead: stop.finalize()


def log_loss(run: Run, loss: torch.Tensor, step: GlobalStep, batch: int) -> None:
    """Log the mean loss of the global batch, and its parts. Collective on several ranks."""
    context = run.context
    mean = mean_over_ranks(context, loss)
    if run.losses is not None: run.losses.add(batch, mean)
    values = {LOSS: mean}
    values |= context.loss_parts.take(step.weight, run.state.parallelism)
    run.logger.log_metrics(values, batch)
