"""The work of `Trainer.fit` around the loop: data, schedules, parts, and the notes on an error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.checks import as_list
from hocket.trainer.data.loader_checks import check_ends
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.errors import DurationReachedError, TrainerConfigError
from hocket.trainer.evaluation.evaluator import as_evaluators
from hocket.trainer.interval import IsTime
from hocket.trainer.log.notices import print_notices
from hocket.trainer.loop.loop import train
from hocket.trainer.loop.nonfinite import NonFiniteGuard
from hocket.trainer.loop.preemption import sparing_workers
from hocket.trainer.loop.run import Run
from hocket.trainer.metrics.metric_direction import metric_direction
from hocket.trainer.optim import MetricScheduler, Scheduler, check_metrics, prepare_schedulers
from hocket.trainer.process.process_settings import collecting_every
from hocket.trainer.setup.arguments import scaled_duration
from hocket.trainer.setup.checkpoint_setup import resume_loader
from hocket.trainer.setup.config import TrainerConfig
from hocket.trainer.setup.fields import complete
from hocket.trainer.setup.fit_targets import FitTargets
from hocket.trainer.setup.loader_setup import attach_loader
from hocket.trainer.setup.run_changes import set_microbatch_size, set_precision
from hocket.trainer.setup.run_summary import print_summary
from hocket.trainer.state import State
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.step.oom_restart import limit_microbatch, record_out_of_memory
from hocket.trainer.step.pipeline_step import PipelineStep
from hocket.trainer.time import TimeInput, TimeUnit
from hocket.trainer.timestamp import Timestamp


@dataclass(frozen=True, slots=True)
class FitSettings:
    """The arguments of `Trainer.fit`: the name, type, default and text of each; None for no change."""

    duration: TimeInput | None = None
    """The additional training; a bare number counts epochs. Sets `state.max_duration`."""
    _: KW_ONLY
    train_dataloader: Any = None
    """The data from here on, in place of the trainer's; a new epoch begins."""
    train_dataloader_label: str = "train"
    """The name of that data."""
    train_subset_num_batches: int | None = None
    """Number of batches in an epoch from here on; -1 for all."""
    spin_dataloaders: bool | None = None
    """As for the trainer, in place of its setting."""
    reset_time: bool = False
    """Whether to start again at time 0; the optimizers keep their state."""
    schedulers: Scheduler | LRScheduler | Sequence[Scheduler | LRScheduler] | None = None
    """Schedules from here on, in place of those of the trainer."""
    scale_schedule_ratio: float | None = None
    """A factor by which `duration` (if None, the trainer's `max_duration`) and the schedules are stretched,
    in place of the trainer's."""
    step_schedulers_every_batch: bool | None = None
    """As for the trainer, in place of its setting."""
    eval_dataloader: Any = None
    """As for the trainer, in place of its evaluators."""
    eval_subset_num_batches: int = -1
    """For `eval_dataloader`."""
    eval_interval: TimeInput | IsTime = 1
    """For `eval_dataloader`."""
    device_train_microbatch_size: int | str | MicrobatchSearch | None = None
    """Number of samples in a microbatch from here on; `"auto"` measures again."""
    precision: str | None = None
    """The precision from here on; not for a sharded model."""

    def __post_init__(self) -> None:
        complete(self)

    @property
    def has_data(self) -> bool:
        """Whether the training data change."""
        return self.train_dataloader is not None or self.train_subset_num_batches is not None

    def change(self, config: TrainerConfig) -> TrainerConfig:
        """Return the arguments of `Trainer`, with the training data of this call in place of the old ones."""
        has_loader = self.train_dataloader is not None
        named = {
            "train_dataloader": self.train_dataloader,
            "train_dataloader_label": self.train_dataloader_label if has_loader else None,
            "train_subset_num_batches": self.train_subset_num_batches,
            "spin_dataloaders": self.spin_dataloaders,
        }
        changed = {name: value for name, value in named.items() if value is not None}
        return replace(config, **changed)


def prepare_fit(
    run: Run, config: TrainerConfig, given: FitSettings, targets: FitTargets, made: ExitStack
) -> TrainLoader | None:
    """Make the changes that a call of `fit` asks for, and print the summary of the run. Collective.

    Args:
        run: The parts of the run.
        config: The arguments of `Trainer`, with those of this call in their place.
        given: The arguments.
        targets: The durations at which the calls of `fit` end.
        made: The exit stack that closes a new loader.

    Returns:
        The loader to train on; None where a resumed run has nothing left to train.

    Raises:
        TrainerConfigError: If there is no data or no duration.
        DurationReachedError: If a run that was not resumed has nothing left.
    """
    state = run.state
    is_repeated = targets.is_repeated(run)
    if given.has_data:
        _set_data(run, config, made, is_repeated=is_repeated)
    if run.loader is None:
        raise TrainerConfigError("`train_dataloader` is required by `fit`; pass it to `Trainer` or to `fit`")
    if given.reset_time:
        run.loader.close()
        run.loader.epoch_rng = None
        run.run_state.forget_loaded()
        state.timestamp = state.previous_timestamp = Timestamp()
        run.evaluation.forget_last()
        if run.checkpointer is not None:
            run.checkpointer.forget_last()
    if given.eval_dataloader is not None:
        state.evaluators = as_evaluators(
            given.eval_dataloader,
            subset_num_batches=given.eval_subset_num_batches,
            eval_interval=given.eval_interval,
        )
    if given.device_train_microbatch_size is not None:
        set_microbatch_size(run, given.device_train_microbatch_size)
    if given.precision is not None:
        set_precision(run, given.precision)
    _set_schedules(run, given, is_repeated=is_repeated)
    targets.set_duration(run, given.duration, given.scale_schedule_ratio or 1.0)
    if _is_finished(run):
        return None
    for evaluator in state.evaluators:
        run.evaluation.prepare(evaluator)
    check_metrics(state.schedulers, _metric_names(state))
    resume_loader(run, config)
    run.run_state.forget_loaded()
    run.run_state.guard.start()
    if run.loader.prefetcher.max_batches is None:
        check_ends(state.dataloader, state.max_duration)
    _announce_fit(run, config)
    return run.loader


def _metric_names(state: State) -> list[str]:
    """Return the names in the log of the metrics that a fit measures."""
    labels = {evaluator.label for evaluator in state.evaluators}
    measured = {label: metrics for label, metrics in state.eval_metrics.items() if label in labels}
    return [
        f"metrics/{label}/{name}"
        for label, metrics in {"train": state.train_metrics, **measured}.items()
        for name in metrics
    ]


def _set_data(run: Run, config: TrainerConfig, made: ExitStack, *, is_repeated: bool) -> None:
    """Replace the training data; a new epoch begins, unless they are the data of a loaded position."""
    state, run_state = run.state, run.run_state
    if config.train_dataloader is None:
        return
    # A checkpoint of `load_path` belongs to the first loader of the trainer.
    if not (run_state.has_loaded and (is_repeated if run.is_own_checkpoint else run.loader is None)):
        run_state.forget_loaded()
        if state.counts.batch_in_epoch:
            state.advance(state.timestamp.to_next_epoch().counts)
    if run.loader is not None:
        run.loader.close()
    attach_loader(run, config, made)


def _set_schedules(run: Run, given: FitSettings, *, is_repeated: bool) -> None:
    """Set the schedules, and their ratio and stepping, where `fit` was given them.

    Raises:
        TrainerConfigError: If torch's schedulers would have to be stretched while they run.
    """
    state = run.state
    schedulers, ratio = given.schedulers, given.scale_schedule_ratio
    if given.step_schedulers_every_batch is not None:
        state.step_schedulers_every_batch = given.step_schedulers_every_batch
    if schedulers is None and ratio is None:
        return
    old_ratio = state.scale_schedule_ratio
    new_ratio = old_ratio if ratio is None else ratio
    if schedulers is not None:
        had_none, new_schedulers = not state.schedulers, as_list(schedulers)
        prepare_schedulers(new_schedulers, state.optimizers, ratio=new_ratio)
        state.schedulers = new_schedulers
        if is_repeated if run.is_own_checkpoint else had_none:
            run.run_state.resume_schedulers()
    elif any(isinstance(scheduler, (LRScheduler, MetricScheduler)) for scheduler in state.schedulers):
        raise TrainerConfigError(
            "torch's schedulers cannot be stretched once they run; pass new ones as `fit(schedulers=…)` "
            "beside `scale_schedule_ratio`"
        )
    else:
        prepare_schedulers(state.schedulers, state.optimizers, ratio=new_ratio)
    state.scale_schedule_ratio = new_ratio
    if given.duration is None and state.max_duration is not None:
        state.max_duration = scaled_duration(state.max_duration, new_ratio / old_ratio)


def _is_finished(run: Run) -> bool:
    """Return whether a resumed run has nothing left to train, and print it; clear an earlier stop.

    Raises:
        DurationReachedError: If a run that was not resumed has nothing left.
    """
    state = run.state
    state.stop.clear()
    if not state.is_over():
        return False
    assert state.max_duration is not None
    done = state.timestamp.get(state.max_duration.unit)
    if run.is_own_checkpoint:
        trained = f"the run has trained for {done.describe()} of {state.max_duration.describe()}"
        notice = f"{trained}: it is finished; a longer `max_duration` goes on"
        print_notices(state, [*run.notices, notice])
        run.notices = []
        if run.checkpointer is not None:
            run.checkpointer.save_at_end()  # a copy in memory may be later than the last checkpoint
        return True
    raise DurationReachedError(
        f"the run has trained for `{done}`, and `max_duration` is `{state.max_duration}`; pass a longer one, "
        "or `fit(duration=…)` for how much more"
    )


def _start_run(run: Run, config: TrainerConfig, loader: TrainLoader) -> None:
    """Set the parts of the run that belong to one fit. Collective."""
    state = run.state
    is_first = run.sync.rank == 0
    (run.clock_s, num_destinations) = run.sync.sum_of(
        run.clock.now() if is_first else 0.0, len(run.logger.destinations)
    )
    run.guard = guard = NonFiniteGuard(config.loop.nonfinite_loss, state, run.sync, loader)
    if run.checkpointer is not None:
        run.checkpointer.before_save = guard.settle
    # A replay compares the loss of every step.
    run.is_loss_logged = num_destinations > 0 or config.replay is not None
    run.log_every = config.loop.log_every if config.replay is None else 1
    run.gc_interval = config.loop.gc_interval
    run.prefetches = config.loop.prefetch_depth > 0


def _check_retention(state: State, config: TrainerConfig) -> None:
    """Check that each policy that keeps the best checkpoints knows which values are better.

    Raises:
        TrainerConfigError: If a policy has no `mode`, and neither its metric nor the metric's name says it.
    """
    policies = [*config.retention, *(one for saver in config.savers for one in as_list(saver.retention))]
    for policy in policies:
        metric = getattr(policy, "metric", None)
        is_undecided = isinstance(metric, str) and getattr(policy, "mode", "") is None
        if is_undecided and metric_direction(state, str(metric)) is None:
            raise TrainerConfigError(
                f"neither the metric `{metric}` nor its name says whether more of it is better; pass "
                f"`{type(policy).__name__}(metric={metric!r}, mode='max')` if it is, or `mode='min'` if "
                "less is"
            )


def _announce_fit(run: Run, config: TrainerConfig) -> None:
    """Check the folder of checkpoints, and print the summary of the run. Collective."""
    state = run.state
    _check_retention(run.state, config)
    # A search for the microbatch size finds the limit by itself.
    limit = None if run.auto_step is not None else run.microbatch_limit
    if notice := limit_microbatch(state, limit):
        run.notices.append(notice)
    assert state.max_duration is not None
    if state.max_duration.unit is TimeUnit.ITERATION and state.iteration_length is None:
        run.notices.append(
            f"`max_duration` is `{state.max_duration}`, and no iteration ends until `state.iteration_length` "
            "is set, such as `Time(1, 'ep')`"
        )
    if (weighing := run.context.weighing) is not None:
        is_split = state.device_train_microbatch_size is not None or run.auto_step is not None
        weighing.start(is_needed=is_split or run.sync.num_ranks > 1)
    if isinstance(state.train_step, PipelineStep):
        state.train_step.check_batches(state.dataloader)
    if run.checkpointer is not None:
        run.checkpointer.check_folder(run.sync)
    print_summary(
        state,
        data_source=run.data_source,
        notices=run.notices,
        is_searched=run.auto_step is not None,
        has_default_optimizer=not as_list(config.optimizers),
        saves=_describe_saves(run, config),
    )
    run.notices = []
    state.model.train()


def _describe_saves(run: Run, config: TrainerConfig) -> str:
    if run.checkpointer is not None:
        return ", ".join(run.checkpointer.locations)
    if config.replay is not None:
        return "nothing, in a replay"
    is_trial = config.loop.fast_dev_run
    return "nothing, in a trial run" if is_trial else "nothing, since no `save_folder` was given"


def train_run(run: Run, config: TrainerConfig, loader: TrainLoader) -> None:
    """Run the loop with the parts of a run; add a note with the time to any error. Collective."""
    state = run.state
    try:
        if (steps := config.loop.num_sanity_val_steps) and not state.counts.batch:
            run.evaluation.rehearse(steps)
        run.notice.install(state.stop, saves=run.checkpointer is not None)
        with sparing_workers(), collecting_every(config.loop.gc_interval):
            _start_run(run, config, loader)
            train(run)
            run.logger.flush()
        run.notice.exit_if_received(run.sync)
    except BaseException as error:
        if not any(note.startswith("raised by `") for note in getattr(error, "__notes__", ())):
            error.add_note(f"raised while training, at {state.timestamp.describe()}")
        if (facts := run.context.facts) is not None and run.auto_step is None:
            record_out_of_memory(error, state, num_samples=facts.samples)
        raise
    finally:
        run.notice.release()
