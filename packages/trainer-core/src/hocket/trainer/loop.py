"""The training loop, in the order in which things happen; `Event` has it in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.trainer.accumulation import LossMean, microbatches
from hocket.trainer.agreement import Agreed
from hocket.trainer.engine import Engine
from hocket.trainer.event import Event
from hocket.trainer.feeding import Fed, Feed
from hocket.trainer.logger import Logger
from hocket.trainer.optim import apply_schedulers
from hocket.trainer.precision import Precision
from hocket.trainer.state import State
from hocket.trainer.timestamp import Timestamp

# ruff: noqa: E701 - an event is one line, so that the loop fits a screen
# fmt: off


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts that a fit runs with."""

    state: State
    engine: Engine
    logger: Logger
    feed: Feed
    precision: Precision
    must_not_fetch_ahead: Callable[[State, Timestamp], bool]
    """Whether the data must stand still at that timestamp, because a checkpoint is due there."""
    is_loss_logged: bool
    """Whether any rank logs; the loss is reduced over ranks only then."""
    clock_s: float = 0.0
    """When the last step ended, on the clock that counts training time."""


def train(run: Run) -> None:
    """Train until `state.max_duration`. Nothing in here reads the device or waits for another rank's news."""
    state, on, fire = run.state, run.engine.on, run.engine.fire
    if on.fit_start: fire(Event.FIT_START)
    while not state.is_over():
        counts = state.timestamp.counts
        if on.iteration_start and not (counts.batch_in_epoch or counts.epoch_in_iteration):
            fire(Event.ITERATION_START)
        if on.epoch_start and not counts.batch_in_epoch: fire(Event.EPOCH_START)

        while not state.is_over():
            if on.before_dataloader: fire(Event.BEFORE_DATALOADER)
            if (taken := run.feed.take()) is None:
                break
            fed, agreed = taken
            state.batch = fed.batch
            if on.after_dataloader: fire(Event.AFTER_DATALOADER)

            if on.batch_start: fire(Event.BATCH_START)
            train_batch(run, fed, agreed)
            if on.batch_end: fire(Event.BATCH_END)
            if on.batch_checkpoint: fire(Event.BATCH_CHECKPOINT)

        if run.feed.should_stop:
            state.end_here()
        elif run.feed.is_epoch_over or _is_epoch_complete(run):
            state.advance(state.timestamp.to_next_epoch())
            if on.epoch_end: fire(Event.EPOCH_END)
            if on.epoch_checkpoint: fire(Event.EPOCH_CHECKPOINT)
            if state.is_iteration_over():
                state.advance(state.timestamp.to_next_iteration())
                if on.iteration_end: fire(Event.ITERATION_END)
                if on.iteration_checkpoint: fire(Event.ITERATION_CHECKPOINT)
    if on.fit_end: fire(Event.FIT_END)


def train_batch(run: Run, fed: Fed, agreed: Agreed) -> None:
    """Make one step, from the batch on the device to the advanced timestamp."""
    state, on, fire, precision = run.state, run.engine.on, run.engine.fire, run.precision
    apply_schedulers(state)
    if on.before_train_batch: fire(Event.BEFORE_TRAIN_BATCH)
    model_loss: Any = state.model.loss
    batch, mean = state.batch, LossMean(agreed, state.parallelism)
    samples = run.feed.spec.num_samples(batch) if state.algorithms else fed.samples
    size = state.device_train_microbatch_size
    for state.batch, weight, is_last in microbatches(
        batch, fed, agreed, size=size, spec=run.feed.spec, samples=samples
    ):
        if size is not None:
            state.parallelism.sync_gradients(state.module, is_last)
        with precision.forward():
            if on.before_forward: fire(Event.BEFORE_FORWARD)
            state.outputs = state.module(state.batch)
            if on.after_forward: fire(Event.AFTER_FORWARD)
            if on.before_loss: fire(Event.BEFORE_LOSS)
            state.loss = model_loss(state.outputs, state.batch)
            if on.after_loss: fire(Event.AFTER_LOSS)
        if on.before_backward: fire(Event.BEFORE_BACKWARD)
        precision.backward(mean.share_of(state.loss, weight, state.outputs))
        if on.after_backward: fire(Event.AFTER_BACKWARD)
        state.outputs = state.loss = None
    state.batch = batch

    # While the device is busy with what it was given, get the next batch, and tell the other ranks of it.
    after = state.timestamp.to_next_batch(
        samples=agreed.samples, tokens=agreed.tokens, duration=_seconds_since_last(run, agreed)
    )
    if not (state.is_over(after) or run.must_not_fetch_ahead(state, after)):
        run.feed.fetch_ahead()

    precision.unscale(state.optimizers)
    mean.correct(state.module.parameters())
    state.loss = mean.of_this_rank(fed.weight)
    if on.after_train_batch: fire(Event.AFTER_TRAIN_BATCH)
    precision.step(state.optimizers, skip=not agreed.weight)
    if run.is_loss_logged:
        run.logger.log_metrics({"loss/train/total": mean.over_ranks()}, step=after.counts.batch)
    state.advance(after)


def _seconds_since_last(run: Run, agreed: Agreed) -> float:
    """The time since the step before; with several ranks by rank 0's clock, so that all count the same."""
    before = run.clock_s
    run.clock_s = time.perf_counter() if agreed.clock_s is None else agreed.clock_s
    return run.clock_s - before


def _is_epoch_complete(run: Run) -> bool:
    """Whether the training ended just where the epoch does: its end then counts as reached."""
    is_last = run.state.timestamp.counts.batch_in_epoch == run.state.dataloader_len
    return is_last and run.feed.is_at_end()
