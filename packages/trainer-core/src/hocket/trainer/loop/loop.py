"""The training loop; the docstring of `Event` gives it in pseudocode."""

from __future__ import annotations

from dataclasses import replace

import torch

from hocket.trainer.data.prefetch import DeviceBatch, count
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.event import Event
from hocket.trainer.loop.run import Run, evaluate_if_due, finish_batch, log_loss
from hocket.trainer.ranks.step_sync import GlobalStep
from hocket.trainer.state import State
from hocket.trainer.step.step import mean_over_ranks
from hocket.trainer.timestamp import after_batch

# ruff: noqa: E701 - an event is one line, so that the loop fits a screen
# fmt: off


def train(run: Run) -> None:
    """Train until `state.max_duration` or a stop. Reads no device and waits for no other rank."""
    state, loader, on, fire = run.state, run.loader, run.engine.on, run.engine.fire
    metrics, checkpointer, stop = run.context.train_metrics, run.checkpointer, run.state.stop
    assert loader is not None
    assert run.guard is not None
    if on.fit_start: fire(Event.FIT_START)
    while not state.is_over():
        counts = state.counts
        if on.iteration_start and not (counts.batch_in_epoch or counts.epoch_in_iteration):
            fire(Event.ITERATION_START)
        if on.epoch_start and not counts.batch_in_epoch: fire(Event.EPOCH_START)
        run.context.find_unoptimized()
        if metrics and not counts.batch_in_epoch: metrics.start_epoch()

        while not state.is_over():
            if on.before_dataloader: fire(Event.BEFORE_DATALOADER)
            if (taken := loader.take(state.counts.batch)) is None:
                break
            facts, step = taken
            state.batch, facts.batch = facts.batch, None
            if state.schedulers: state.set_rates()
            if on.after_dataloader: fire(Event.AFTER_DATALOADER)

            if on.batch_start: fire(Event.BATCH_START)
            train_batch(run, facts, step)
            if on.batch_end: fire(Event.BATCH_END)
            finish_batch(run)

        if loader.is_epoch_over or (not stop.is_final and _is_epoch_complete(state, loader)):
            loader.is_epoch_over = False
            state.advance(state.timestamp.to_next_epoch().counts)
            if metrics: metrics.finish()
            if on.epoch_end: fire(Event.EPOCH_END)
            if state.evaluators: evaluate_if_due(run, Event.EPOCH_END)
            if on.epoch_checkpoint: fire(Event.EPOCH_CHECKPOINT)
            if checkpointer: checkpointer.save_if_due(Event.EPOCH_CHECKPOINT)
            if state.is_iteration_over():
                state.advance(state.timestamp.to_next_iteration().counts)
                if on.iteration_end: fire(Event.ITERATION_END)
                if state.evaluators: evaluate_if_due(run, Event.ITERATION_END)
                if on.iteration_checkpoint: fire(Event.ITERATION_CHECKPOINT)
                if checkpointer: checkpointer.save_if_due(Event.ITERATION_CHECKPOINT)
            if stop.is_agreed: stop.finalize()
    if metrics: metrics.finish()
    run.guard.settle()
    is_preempted = run.is_preempted()
    # Little time may be left, so the save comes first.
    if is_preempted and checkpointer: checkpointer.save_in_time(run.sync, run.notice.killed_at)
    if on.fit_end: fire(Event.FIT_END)
    if state.evaluators and not is_preempted: evaluate_if_due(run, Event.FIT_END)
    if checkpointer: checkpointer.save_at_end()


def train_batch(run: Run, facts: DeviceBatch, step: GlobalStep) -> None:
    """Make one step, from the batch on the device to the advanced timestamp."""
    state, context, on, fire = run.state, run.context, run.engine.on, run.engine.fire
    if on.before_train_batch: fire(Event.BEFORE_TRAIN_BATCH)
    if on.after_dataloader or on.batch_start or on.before_train_batch:
        facts, step = recount(run, facts, step)
    context.facts, context.step = facts, step
    train_step, loader, guard = state.train_step, run.loader, run.guard
    assert loader is not None
    assert guard is not None
    loss = train_step.compute_gradients(state.batch)
    if run.check_loss and not context.is_skipped:
        check, run.check_loss = run.check_loss, None
        check(loss)

    # While the device is busy, fetch the next batch, and exchange its counts with the other ranks. On several
    # ranks, the same exchange carries rank 0's clock, which counts the time for all. Until it is there, the
    # step is taken to be as long as the last one.
    clock_s, is_alone = run.clock.now(), run.sync.num_ranks == 1
    step_s = clock_s - run.clock_s if is_alone else state.counts.batch_wct
    after = after_batch(state.counts, step.samples, step.tokens, step_s)
    if run.prefetches and not (
        state.is_over(after)
        or state.stop.is_agreed
        or (run.checkpointer and run.checkpointer.is_due_at(after))
    ):
        loader.fetch_ahead(clock_s)

    state.loss = loss
    if context.precision.is_scaled: context.unscale()
    if on.after_train_batch: fire(Event.AFTER_TRAIN_BATCH)
    if guard.allows(loss):
        train_step.update()
    else:
        context.skip_update()
    if context.unoptimized: context.clear_unoptimized()
    should_log = run.is_loss_logged and after.batch % run.log_every == 0 and not context.is_skipped
    if should_log: log_loss(run, loss, step, after.batch)
    elif is_alone and run.losses is not None and not context.is_skipped:
        run.losses.add(after.batch, mean_over_ranks(context, loss))
    if not is_alone:
        clock_s = loader.agreed_clock(clock_s)
        after = after_batch(state.counts, step.samples, step.tokens, clock_s - run.clock_s)
    run.clock_s = clock_s
    state.advance(after)
    if context.train_metrics: context.train_metrics.end_batch(should_log=should_log)


def recount(run: Run, facts: DeviceBatch, step: GlobalStep) -> tuple[DeviceBatch, GlobalStep]:
    """Count the batch again, because an algorithm or callback may have changed it.

    On several ranks the counts are exchanged again if an algorithm listens at an event at which it can change
    the batch; all ranks have the same algorithms. The exchange waits for the other ranks.
    """
    state, loader = run.state, run.loader
    assert loader is not None
    batch = state.batch
    counted = count(loader.spec, batch)
    if counted.samples == facts.samples:
        counted = replace(
            counted,
            counted=facts.counted,
            tokens=counted.tokens * facts.counted // facts.samples,
        )
        if not _has_other_weights(run, counted, facts):
            counted = replace(counted, weights=facts.weights, weight=facts.weight)
    elif facts.counted < facts.samples:
        # An algorithm changed the number of rows of a short last batch: the rows share its weight evenly.
        weights = [facts.weight / counted.samples] * counted.samples
        counted = replace(counted, counted=facts.counted, weights=weights, weight=facts.weight)
    if run.sync.num_ranks > 1 and not run.engine.may_change_batches:
        return counted, step
    new_step = run.sync.begin(counted).wait()
    loader.progress.num_recounted += step.samples - new_step.samples
    return counted, new_step


def _has_other_weights(run: Run, counted: DeviceBatch, facts: DeviceBatch) -> bool:
    """Return whether the loss weights may have changed; weights on a device are not compared."""
    weights = counted.weights
    if weights is None or facts.counted < facts.samples:
        return False
    if isinstance(weights, torch.Tensor):
        return isinstance(facts.weights, torch.Tensor) or run.engine.may_change_batches
    return weights != facts.weights


def _is_epoch_complete(state: State, loader: TrainLoader) -> bool:
    """Return whether the training ended exactly at the end of an epoch, which then counts as complete."""
    return state.counts.batch_in_epoch == state.dataloader_len and loader.is_at_end()
