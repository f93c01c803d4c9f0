"""The plain steps of a fit, with their parts bound beforehand and without what they do not need.

`loop.train` is the reference. A test holds both to the same events and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.trainer.event import Event
from hocket.trainer.fit_run import Run, finish_batch, log_loss
from hocket.trainer.optim import apply_schedulers
from hocket.trainer.step import StandardStep
from hocket.trainer.timestamp import after_batch


def prepare_steps(run: Run) -> Callable[[], bool] | None:
    """Bind the parts of a run for its plain steps.

    A step is plain in one process, with the standard train step on unscaled gradients, whose batch is
    ahead, where nobody listens between `BEFORE_DATALOADER` and `AFTER_BACKWARD` and no stop was requested.

    Returns:
        A function that makes plain steps as long as they come, and returns whether it made one; None where
        no step of the run can be plain.
    """
    state, context, loader, guard = run.state, run.context, run.loader, run.guard
    standard, checkpointer, clock = context.standard, run.checkpointer, run.clock
    if run.sync.num_ranks > 1 or not run.prefetches or type(standard) is not StandardStep:
        return None
    if context.precision.is_scaled or context.train_metrics or context.spec.microbatch_transforms:
        return None
    on, fire, stop = run.engine.on, run.engine.fire, state.stop
    take_ahead, fetch_ahead, allows, is_over = (
        loader.take_ahead,
        loader.fetch_ahead,
        guard.allows,
        state.is_over,
    )
    compute_plainly, compute_gradients = standard.compute_plainly, standard.compute_gradients
    precision, now, update_plainly = context.precision, clock.now, standard.update_plainly

    def make_plain_steps() -> bool:
        has_made_one = False
        while (
            not on.in_step
            and stop.reason is None
            and state.train_step is standard
            and not precision.is_scaled
            and (taken := take_ahead(state.counts.batch)) is not None
        ):
            has_made_one = True
            facts, step = taken
            state.batch = facts.batch
            if state.schedulers:
                apply_schedulers(state)
            context.facts, context.step = facts, step
            update = update_plainly
            if (loss := compute_plainly(facts.batch)) is None:
                loss, update = compute_gradients(facts.batch), standard.update
            time_s = now()
            after = after_batch(state.counts, step.samples, step.tokens, time_s - run.clock_s)
            run.clock_s = time_s
            is_last = is_over(after)
            if not (is_last or stop.is_agreed or (checkpointer and checkpointer.is_due_at(after))):
                fetch_ahead()
            state.loss = loss
            if on.after_train_batch:
                fire(Event.AFTER_TRAIN_BATCH)
            if allows(loss):
                update()
            else:
                precision.step(state.optimizers, skip=True)
            if run.is_loss_logged and after.batch % run.log_every == 0:
                log_loss(run, loss, step, after.batch)
            state.previous_counts, state.counts = state.counts, after
            if on.batch_end:
                fire(Event.BATCH_END)
                is_last = is_over()
            if checkpointer or state.evaluators or run.gc_interval or on.batch_checkpoint or stop.is_agreed:
                finish_batch(run)
                is_last = is_over()
            if is_last:
                break
        return has_made_one

    return make_plain_steps
