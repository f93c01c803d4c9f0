"""The construction of a run's parts from the arguments of `Trainer`, each after those it depends on."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW

from hocket.trainer.callback import Callback
from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.registry import CheckpointEntry
from hocket.trainer.checks import as_list
from hocket.trainer.engine.engine import Engine
from hocket.trainer.engine.misspelt_events import warn_of_misspelt_events
from hocket.trainer.engine.trace import log_algorithms
from hocket.trainer.evaluation.evaluation import EvaluationLoop
from hocket.trainer.evaluation.evaluator import as_evaluators
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.loss_journal import LossJournal
from hocket.trainer.loggers.console import ConsoleLogger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.loggers.progress_bar import ProgressBarLogger
from hocket.trainer.loop.preemption import StopNotice
from hocket.trainer.loop.run import Run
from hocket.trainer.metrics.train_metrics import TrainMetrics
from hocket.trainer.optim import prepare_schedulers
from hocket.trainer.optim.muon.optimizer import warn_of_shards
from hocket.trainer.precision import Precision, default_precision
from hocket.trainer.process.devices import choose_device
from hocket.trainer.process.process_settings import deterministic
from hocket.trainer.process.providers import find_provider, own
from hocket.trainer.process.rng import seed_rng
from hocket.trainer.process.world import export_place, num_ranks
from hocket.trainer.protocols import Parallelism, Pipelined
from hocket.trainer.ranks.single_process import SingleProcess
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.setup.arguments import as_optimizers, as_schedulers, check_trains
from hocket.trainer.setup.checkpoint_setup import (
    find_copies,
    find_store,
    load_checkpoint,
    make_checkpointers,
    resumed_run_name,
)
from hocket.trainer.setup.config import TrainerConfig
from hocket.trainer.setup.loader_setup import attach_loader
from hocket.trainer.setup.replay_setup import LOSSES, find_start
from hocket.trainer.setup.run_changes import keep_found_size
from hocket.trainer.setup.run_summary import recovery_times
from hocket.trainer.state import State
from hocket.trainer.step.gradient_clipping import GradientClipper
from hocket.trainer.step.losses.losses import is_compiled
from hocket.trainer.step.microbatch_step import AutoMicrobatchStep
from hocket.trainer.step.oom_restart import find_microbatch_limit
from hocket.trainer.step.pipeline_step import PipelineStep
from hocket.trainer.step.skipped_steps import SkippingStep, step_ranges
from hocket.trainer.step.step import StepContext, choose_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClasses:
    """The classes of a trainer's parts, for a subclass of `Trainer` that extends them."""

    state: type[State] = State
    engine: type[Engine] = Engine
    logger: type[Logger] = Logger


def assemble(
    config: TrainerConfig,
    made: ExitStack,
    register: Callable[[Run], None],
    classes: PartClasses,
) -> Run:
    """Make the parts of a run: fire `INIT`, lay the model out, load the checkpoint if there is one.

    Collective.

    Args:
        config: The arguments.
        made: The exit stack that closes the parts made here, in reverse order.
        register: Called before a checkpoint is loaded, to add parts to its state.
        classes: The classes of the state, the engine and the logger.
    """
    _set_log_level(config.python_log_level)
    export_place()
    notice = StopNotice()
    made.callback(notice.restore)  # the last of all, since copies of a notice may come while parts are closed
    given = config.parallelism
    device = choose_device(getattr(given, "device", None) if config.device is None else config.device)
    if config.deterministic_mode:
        made.enter_context(deterministic(device))
    precision_name = config.precision or default_precision(device)
    precision = Precision(precision_name, device, config.precision_config, loss_scale=config.loss_scale)
    parallelism = given or _find_parallelism(config, device, precision_name, made)
    sync = StepSync(parallelism)
    made.callback(sync.close)
    sync.connect(getattr(parallelism, "timeout_s", config.dist_timeout))
    state = _make_state(classes.state, config, parallelism, sync, device, precision_name)
    logger = classes.logger(state, _destinations(config))
    run_state = CheckpointState(state, precision, keeps_run_name=config.run_name is not None)
    run_state.destinations = logger.destinations
    store = find_store(config, state.run_name, made, parallelism=parallelism)
    copies = find_copies(config, store, sync, made, parallelism=parallelism)
    state.run_name = resumed_run_name(config, store, copies, sync) or state.run_name
    checkpointer = make_checkpointers(config, store, run_state, state, made, copies=copies)
    engine = _make_engine(classes.engine, config, state, logger, made)
    context = StepContext(state=state, engine=engine, precision=precision)
    auto_step = _set_train_step(config, context, sync, logger)
    if config.auto_log_hparams:
        logger.log_hyperparameters(config.hyperparameters())
    engine.fire(Event.INIT)

    prepare_schedulers(state.schedulers, state.optimizers, ratio=config.scale_schedule_ratio)
    state.module = parallelism.lay_out(state.model, state.optimizers)
    warn_of_shards(state.optimizers)
    _compile(config, context)
    evaluation = EvaluationLoop(
        state,
        engine,
        logger,
        precision,
        auto_shard=config.loop.auto_shard,
        most_batches=config.trial.most_eval_batches,
    )
    _add_metrics(context, logger, run_state, evaluation, are_kept=config.save_metrics)
    run = Run(
        sync=sync,
        state=state,
        logger=logger,
        engine=engine,
        precision=precision,
        context=context,
        run_state=run_state,
        evaluation=evaluation,
        checkpointer=checkpointer,
        notices=[*(() if checkpointer is None else checkpointer.notices), *evaluation.notices],
        store=store,
        copies=copies,
        auto_step=auto_step,
        microbatch_limit=find_microbatch_limit(sync),
        notice=notice,
        check_loss=getattr(parallelism, "check_loss", None),
    )
    keep_found_size(run)
    register(run)
    _keep_losses(run, config)
    if config.replay is not None:
        find_start(run, config.replay)
    if config.train_dataloader is not None:
        attach_loader(run, config, made)
    load_checkpoint(run, config, made)
    return run


def _keep_losses(run: Run, config: TrainerConfig) -> None:
    """Record the losses in the checkpoints of a run that saves, and in a replay."""
    if config.replay is not None:
        run.losses = config.replay.losses
    elif run.checkpointer is not None:
        run.losses = losses = LossJournal()
        losses.num_ranks = run.state.parallelism.data_parallel[1]
        save, load = losses.state_dict, losses.load_state_dict
        run.run_state.registry.add(CheckpointEntry(name=LOSSES, save=save, load=load, placement="rank_zero"))


def _make_engine(
    make: Callable[..., Engine], config: TrainerConfig, state: State, logger: Logger, made: ExitStack
) -> Engine:
    engine = make(state, logger, algorithm_passes=config.algorithm_passes)
    made.callback(engine.close)
    warn_of_misspelt_events((*state.callbacks, *logger.destinations))
    if (profiler := config.profiler) is not None:
        profiler.attach(state, engine)
    if config.log_traces:
        log_algorithms(engine)
    return engine


def _set_train_step(
    config: TrainerConfig, context: StepContext, sync: StepSync, logger: Logger
) -> AutoMicrobatchStep | None:
    """Set `state.train_step`; return the part of it that finds the microbatch size, if there is one."""
    state, auto_step = context.state, None
    if isinstance(state.parallelism, Pipelined):
        state.train_step = PipelineStep(context, unsupported=config.set_beside_pipeline())
        return None
    state.train_step = choose_step(config.train_step, context)
    if (search := config.microbatch_search) is not None:
        state.train_step = auto_step = AutoMicrobatchStep(state.train_step, context, search, sync, logger)
    if steps := step_ranges(config.loop.steps_to_skip):
        state.train_step = SkippingStep(state.train_step, context, steps)
    return auto_step


def _compile(config: TrainerConfig, context: StepContext) -> None:
    """Compile the model if that is asked for, and let the layout of a compiled model compare a pass."""
    state = context.state
    if config.compile_config is not None:
        state.module.compile(**config.compile_config)
    if config.has_compiled_step or is_compiled(state.module):
        context.compare_uncompiled = getattr(state.parallelism, "compare_uncompiled", None)


def _add_metrics(
    context: StepContext,
    logger: Logger,
    run_state: CheckpointState,
    evaluation: EvaluationLoop,
    *,
    are_kept: bool,
) -> None:
    state, add = context.state, run_state.registry.add
    context.train_metrics = metrics = TrainMetrics.of(state, logger, context.precision, is_kept=are_kept)
    if metrics is not None:
        save, load = metrics.state_dict, metrics.load_state_dict
        add(CheckpointEntry(name="train_metrics", save=save, load=load, placement="per_rank"))
    save_eval: Callable[[], Any] = evaluation.state_dict if are_kept else dict
    add(
        CheckpointEntry(
            name="eval_metrics", save=save_eval, load=evaluation.load_state_dict, placement="per_rank"
        )
    )


def _make_state(
    state_class: type[State],
    config: TrainerConfig,
    parallelism: Parallelism,
    sync: StepSync,
    device: torch.device,
    precision: str,
) -> State:
    seed, made_at, salt = _agree_on_seed(config.seed, sync)
    seed_rng(seed + parallelism.data_parallel[0])
    model = config.build_model()
    optimizers = as_optimizers(config.optimizers)
    check_trains(optimizers, model)
    state = state_class(
        model=model,
        optimizers=optimizers or [AdamW(model.parameters(), lr=1e-3)],
        schedulers=as_schedulers(config.schedulers, config.optimizers),
        callbacks=_make_callbacks(config),
        algorithms=as_list(config.algorithms),
        parallelism=parallelism,
        device=device,
        precision=precision,
        device_train_microbatch_size=config.microbatch_size,
        max_duration=config.build_duration(),
        run_name=config.run_name or _run_name(made_at, salt),
        seed=seed,
    )
    state.scale_schedule_ratio = config.scale_schedule_ratio
    state.step_schedulers_every_batch = config.step_schedulers_every_batch
    state.stops_at_once = not config.is_saving
    state.evaluators = as_evaluators(
        config.eval_dataloader,
        subset_num_batches=config.eval_subset_num_batches,
        eval_interval=config.eval_interval,
    )
    return state


def _make_callbacks(config: TrainerConfig) -> list[Any]:
    callbacks = [
        *([] if config.profiler is None else [config.profiler]),
        *(one for one in as_list(config.callbacks) if not isinstance(one, LoggerDestination)),
        *_callbacks_of_settings(config),
    ]
    return sorted(callbacks, key=lambda one: getattr(one, "measures_update", False) is True)


def _callbacks_of_settings(config: TrainerConfig) -> Iterator[Callback]:
    """Yield the callbacks that implement single arguments of `Trainer`."""
    if config.compile_config is not None or config.has_compiled_step:
        # Imported when needed: the package of callbacks takes as long to import as all of the trainer.
        from hocket.trainer.callbacks.compile_monitor import CompileMonitor

        if not any(isinstance(one, CompileMonitor) for one in as_list(config.callbacks)):
            yield CompileMonitor()
    if (times := recovery_times()) is not None:
        yield times
    if (clipping := config.build_clipping()) is not None:
        # The last but for those that measure the update: others may change the gradients before.
        yield GradientClipper(clipping)


def _agree_on_seed(seed: int | None, sync: StepSync) -> tuple[int, int, int]:
    """Return rank 0's seed, its clock in seconds since 1970, and a random 16-bit salt. Collective."""
    own_seed = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
    agreed_seed, made_at, salt = sync.from_rank_0(own_seed, int(time.time()), secrets.randbelow(2**16))
    return agreed_seed, made_at, salt


def _run_name(made_at: int, salt: int) -> str:
    """Return a run name that differs between runs started in the same second, such as those of a sweep."""
    return f"{time.strftime('run-%Y%m%d-%H%M%S', time.gmtime(made_at))}-{salt:04x}"


def _find_parallelism(
    given: TrainerConfig, device: torch.device, precision: str, made: ExitStack
) -> Parallelism:
    config, count = given.build_layout(), num_ranks()
    if config is None and count == 1:
        return SingleProcess(device)
    asked_by = "`fsdp_config`" if config is not None else f"a job of {count} ranks"
    provide = find_provider("parallelism", asked_by=asked_by)
    options: dict[str, Any] = {}
    # Algorithms, and a model that was given in DDP, may state that they leave parameters unused.
    users = [*as_list(given.algorithms), given.model]
    if any(getattr(one, "find_unused_parameters", False) is True for one in users):
        options["find_unused_parameters"] = True
    if any(hasattr(parameter, "device_mesh") for parameter in _parameters_of(given.model)):
        options["model"] = given.model
    if given.loop.gradient_sync is not None:
        options["gradient_sync"] = given.loop.gradient_sync
    parallelism: Parallelism = provide(
        config, device=device, timeout_s=given.dist_timeout, precision=precision, **options
    )
    own(parallelism, made)
    return parallelism


def _parameters_of(model: Any) -> Iterable[torch.Tensor]:
    return model.parameters() if isinstance(model, torch.nn.Module) else ()


def _destinations(config: TrainerConfig) -> list[LoggerDestination]:
    """Return the loggers given as `loggers` or as callbacks, the progress bar and the console logger."""
    loggers = as_list(config.loggers)
    loggers += [one for one in as_list(config.callbacks) if isinstance(one, LoggerDestination)]
    if config.progress_bar and not any(isinstance(one, ProgressBarLogger) for one in loggers):
        loggers.append(ProgressBarLogger())
    if config.log_to_console and not any(isinstance(one, ConsoleLogger) for one in loggers):
        loggers.append(
            ConsoleLogger(config.console_log_interval, config.console_stream, log_traces=config.log_traces)
        )
    return loggers


def _set_log_level(level: str | None) -> None:
    if level is None:
        return
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("hocket").setLevel(level.upper())
