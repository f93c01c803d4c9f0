"""A fast path for the plain steps of a fit, with the parts of the run bound beforehand.

`loop.train` is the reference. A test checks that both fire the same events and give bit-identical results.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch import Tensor

from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.event import Event
from hocket.trainer.loop.fit_run import LOSS, Run, finish_batch, log_loss
from hocket.trainer.step.step import StandardStep
from hocket.trainer.timestamp import after_batch


def prepare_steps(run: Run) -> Callable[[], bool] | None:
    """Bind the parts of a run for its plain steps.

    A step is plain if the train step is the standard one, a batch is ahead, no event between
    `BEFORE_DATALOADER` and `AFTER_BACKWARD` has a listener, and no stop was requested.

    Returns:
        A function that makes steps until one is not plain, and returns whether it made any; None if no step
        of the run can be plain.
    """
    state, context, loader, guard = run.state, run.context, run.loader, run.guard
    standard, checkpointer, precision = context.standard, run.checkpointer, context.precision
    if not run.prefetches or type(standard) is not StandardStep:
        return None
    metrics, is_alone = context.train_metrics, run.sync.num_ranks == 1
    on, fire, stop, is_over, advance = (
        run.engine.on,
        run.engine.fire,
        state.stop,
        state.is_over,
        state.advance,
    )
    take_ahead, fetch_ahead, clock = loader.take_ahead, loader.fetch_ahead, run.clock
    compute, compute_gradients = _bind_compute(run, standard), standard.compute_gradients
    unoptimized, clear_unoptimized = context.unoptimized, context.clear_unoptimized
    allows, reads_loss, queues = guard.allows, guard.reads_at_once, run.logger.queues

    def make_plain_steps() -> bool:
        has_made_one = False
        duration, (index, end) = state.max_duration, state.end()
        while (
            not on.in_step
            and stop.reason is None
            and state.train_step is standard
            and (taken := take_ahead((counts := state.counts)[2])) is not None
        ):
            has_made_one = True
            facts, step = context.facts, context.step = taken
            # The record may be reused, and must not keep the batch alive until then.
            state.batch = batch = facts.batch
            facts.batch = None
            if state.schedulers:
                state.set_rates()
            if (loss := compute(batch, facts)) is None:
                loss = compute_gradients(batch)
            time_s: Any = perf_counter() - clock.excluded_s if is_alone else step.clock_s
            after = after_batch(counts, step.samples, step.tokens, time_s - run.clock_s)
            run.clock_s = time_s
            is_known = state.max_duration is duration and not stop.is_final
            is_last = after[index] >= end if is_known else is_over(after)
            if not (is_last or stop.is_agreed or (checkpointer and checkpointer.is_due_at(after))):
                fetch_ahead()
            state.loss = loss
            if precision.is_scaled:
                context.unscale()
            if on.after_train_batch:
                fire(Event.AFTER_TRAIN_BATCH)
            # Only a finite number minus itself is 0; for any other, `allows` applies the guard's policy.
            if (reads_loss and (value := loss.tolist()) - value == 0.0) or allows(loss):  # type: ignore[operator]
                if precision.is_scaled:
                    standard.update()
                else:
                    if step.weight:
                        for optimizer in state.optimizers:
                            optimizer.step()
                    for optimizer in state.optimizers:
                        optimizer.zero_grad(set_to_none=True)
                    standard.has_gradients = False
            else:
                context.skip_update()
            if unoptimized:
                clear_unoptimized()
            if should_log := run.is_loss_logged and after[2] % run.log_every == 0:
                if reads_loss and context.mean is None and not context.loss_parts.sums:
                    for queue in queues:  # `value` is already on the host
                        queue.put({LOSS: value}, after[2])
                else:
                    log_loss(run, loss, step, after[2])
            advance(after)
            if metrics:
                metrics.end_batch(should_log=should_log)
            if on.batch_end:
                fire(Event.BATCH_END)
                if stop.is_final or state.max_duration is not duration or state.counts is not after:
                    is_last = is_over()
            if checkpointer or state.evaluators or run.gc_interval or on.batch_checkpoint or stop.is_agreed:
                finish_batch(run)
                is_last = is_over()
            if is_last:
                break
        return has_made_one

    return make_plain_steps


def _bind_compute(run: Run, standard: StandardStep) -> Callable[[Any, DeviceBatch], Tensor | None]:
    """Return a short form of `StandardStep.compute_gradients`, for one process without loss scaling.

    The function returns None, without any change, for a batch that is not a single microbatch with a weight
    known to the host, and in a run that needs the standard step, such as one on several ranks.
    """
    if run.sync.num_ranks > 1 or run.context.train_metrics or run.context.spec.microbatch_transforms:
        return _leave_to_standard
    state, context, engine, precision = run.state, run.context, run.engine, run.context.precision

    def compute(batch: Any, facts: DeviceBatch) -> Tensor | None:
        if (
            standard.has_gradients
            or state.device_train_microbatch_size is not None
            or not facts.weight
            or type(facts.weights) is Tensor
            or precision.is_scaled
        ):
            return None
        standard.has_gradients = True
        state.outputs = None
        model: Any = state.model
        if precision.is_plain:
            state.outputs = outputs = state.module(batch)
            loss = model.loss(outputs, batch)
        else:
            with precision.forward():
                state.outputs = outputs = state.module(batch)
                loss = model.loss(outputs, batch)
        del outputs
        if type(loss) is not Tensor or loss.ndim:
            state.loss = loss
            return standard.run_backward_of_parts()
        if not (engine.keeps_outputs or context.keeps_outputs):
            state.outputs = None
        context.mean = None
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        return loss.detach()

    return compute


def _leave_to_standard(batch: Any, facts: DeviceBatch) -> None:
    """Return None, so that `StandardStep.compute_gradients` is called."""
