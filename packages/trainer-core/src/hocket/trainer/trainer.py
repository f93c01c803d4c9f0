"""`Trainer`: the parts of a run, made from arguments, and the methods that run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.engine.engine import Engine
from hocket.trainer.engine.trace import Trace
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.evaluation.prediction import predict
from hocket.trainer.interval import IsTime
from hocket.trainer.log.logger import Logger
from hocket.trainer.models.export import export_for_inference
from hocket.trainer.optim import Scheduler
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.protocols import CheckpointStore, GradientSync, Parallelism
from hocket.trainer.setup.assembly import PartClasses, assemble
from hocket.trainer.setup.checkpoint_setup import save_once, save_soon
from hocket.trainer.setup.fit_setup import FitConfig, prepare_fit, train_run
from hocket.trainer.setup.fit_targets import FitTargets
from hocket.trainer.setup.settings import TrainerConfig
from hocket.trainer.state import State
from hocket.trainer.step.gradient_clipping import GradientClippingConfig
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.profiler import Profiler


class Trainer:
    """The training of a model for a duration, with evaluation, and with checkpoints to continue from.

    In a job of several ranks, every rank makes the same trainer and calls the same methods. An error on one
    rank is raised in its process; the launcher or `dist_timeout` ends the other ranks.

    Args:
        model: A module with `forward(batch)` and `loss(outputs, batch)`, as `ComposerModel` states them; or
            any module, with `loss_fn` or with an output that has a `loss`.
        loss_fn: `(outputs, targets) -> loss`, or `(outputs, batch) -> loss` with that parameter name, for a
            model without a `loss` of its own.
        train_step: The update for a batch, in place of the standard step: an object with
            `compute_gradients(batch)` and `update()`, a class that takes the standard step, or a function
            `(state, batch) -> loss` that computes gradients. See `hocket.trainer.step.step`.
        steps_to_skip: Steps whose data is fetched and not trained on, such as bad data when a run is repeated
            from a checkpoint: numbers of batches as in the log, ranges, or texts such as `"1200-1250"`.
        train_dataloader: A loader of this rank's batches; or a `DataSpec`, or a dict of its arguments.
        train_dataloader_label: The name of the training data in `state.dataloader_label`.
        train_subset_num_batches: Number of batches after which an epoch ends; -1 for all.
        spin_dataloaders: Whether a loader without a state of its own is moved to its position in a
            resumed epoch by fetching and discarding batches; False starts the epoch's data anew.
        prefetch_depth: Number of batches that are fetched and copied to the device ahead of their step; 0 for
            none. At most 1 in a run that saves checkpoints.
        auto_shard: Whether, with several ranks, a plain `DataLoader` with torch's own sampler gets a
            `DistributedSampler`, so that each rank has its own samples.
        global_train_batch_size: Samples of all ranks together in each step, in place of the loader's
            `batch_size`; a plain `DataLoader` then yields the same global batches on any number of ranks. A
            `BatchSizeWarmupScheduler` increases the size during training.
        eval_dataloader: A loader of this rank's batches for evaluation; or a `DataSpec`, an `Evaluator`, or a
            list of `Evaluator`s.
        eval_interval: The interval between evaluations: a number of epochs, a time string such as `"100ba"`,
            a `Time`, or a callable `(state, event) -> bool`, called at the end of each batch, epoch and fit,
            with the same result on every rank. An evaluation also follows the end of a fit that is not at an
            interval. With 0, only `eval` evaluates.
        eval_subset_num_batches: Number of batches of each rank to evaluate; -1 for all.
        max_duration: The end of training: `"2ep"`, `"100ba"`, `"1e9tok"`; a bare number counts epochs.
        optimizers: One or several optimizers, which all step each batch, or a dict of them by name; None for
            `AdamW` with a learning rate of 0.001.
        schedulers: Callables `(state, ssr) -> multiplier` of the learning rates, such as those of
            `hocket.trainer.optim`, or torch's `LRScheduler`s. The multipliers of several schedulers are
            multiplied. With a dict of optimizers, a dict of the same names gives each its own.
        scale_schedule_ratio: A factor by which `max_duration` and the schedules are stretched.
        step_schedulers_every_batch: Whether schedules advance with each batch, or with each epoch; None for
            batches, but epochs for torch's schedulers.
        algorithms: Training methods.
        algorithm_passes: Functions `(algorithms, event) -> algorithms` that change the order in which
            algorithms run; a pair (function, index) places one among the default passes.
        callbacks: Objects whose methods are called at events.
        profiler: A `hocket.trainer.profiler.Profiler`, which records batches and reports on them in words.
        loggers: The destinations of logged values.
        log_every: Number of batches between two logged losses.
        run_name: The name of the run; None for a name from the time.
        progress_bar: Whether to show a progress bar.
        log_to_console: Whether to print the logged values as lines.
        console_stream: `"stdout"`, `"stderr"` or an open text file, for these lines.
        console_log_interval: The interval between two lines.
        log_traces: Whether to report to the loggers which algorithms were applied at which events.
        auto_log_hparams: Whether to log these arguments as hyperparameters.
        python_log_level: Level of the Python loggers of `hocket`, such as `"info"`; None keeps it.
        device: `"cpu"`, `"gpu"` or a torch device; None for a GPU if there is one, else the CPU.
        precision: `"fp32"`, `"amp_bf16"`, `"amp_fp16"`, or `"amp_fp8"` with Transformer Engine; None for
            `"amp_bf16"` on a GPU that supports bf16, else `"fp32"`.
        precision_config: Arguments of Transformer Engine's `DelayedScaling`, for `"amp_fp8"`.
        device_train_microbatch_size: Number of samples in a microbatch; None for a rank's whole batch.
            `"auto"` measures before the first step which size fits, with a tenth of the memory left free; a
            `MicrobatchSearch` changes these settings. The update does not depend on the size.
        accumulate_train_batch_on_tokens: Whether the loss weight of a sample is its number of labels that are
            not ignored, if labels are sequences; False gives every sample the same weight.
        gradient_clipping: The largest norm of all gradients together; or a `GradientClippingConfig`, or a
            dict of its arguments, to limit each element instead. The norm before clipping is logged as
            `l2_norm/grad/before_clipping`.
        nonfinite_loss: The policy for a NaN or infinite loss: `"raise"` ends the run with the step and rank
            named, `"skip"` skips the update on every rank, `"ignore"` continues.
        compile_config: Arguments of `torch.nn.Module.compile` for the model; `{}` for its defaults, None
            for no compilation. Later recompilations are reported, as by `CompileMonitor`.
        seed: The seed, where rank r's random generators start from `seed + r`; None to draw one from torch's
            generator.
        deterministic_mode: Whether torch uses deterministic kernels only.
        gc_interval: Batches between two runs of Python's garbage collector, which then run on all ranks after
            the same batch, and at no other time of a fit; None leaves the time to the collector. Objects that
            exist at the start of a fit with an interval, or of the first fit of a process, are frozen until
            its end.
        fast_dev_run: True for 1, or a number of batches, to try out a script: each `fit` ends after one epoch
            of that many batches, each evaluation has as many, and nothing is saved or sent to loggers.
        overfit_batches: Number (int) or share (float) of the loader's first batches to train on repeatedly,
            unshuffled, with as many batches for evaluation. A working model and loop overfit them.
        num_sanity_val_steps: Number of batches of each evaluator that the first `fit` of a fresh run
            evaluates before it trains, without events and results, to find errors early; -1 for all.
        save_folder: The folder of the checkpoints: a path or URI, in which `{run_name}` is filled in.
        save_filename: A checkpoint's name in `save_folder`, with fields such as `{epoch}` and `{batch}`.
        save_latest_filename: Accepted for Composer's users and not used: a store lists its newest checkpoint.
        save_interval: The interval between checkpoints; one is also saved at the end of training.
        save_async: Whether training continues while a checkpoint is written.
        save_weights_only: Whether to save the model and the time alone.
        save_ignore_keys: Parts to leave out: globs such as `model/head.*`, or a function that edits the tree.
        save_metrics: Whether checkpoints list the last values of the metrics, in their `user`, each under its
            name in the log, such as `metrics/eval/MulticlassAccuracy`. A run that continues from one on as
            many ranks has the metric states in `state.train_metrics` and `state.eval_metrics`.
        save_num_checkpoints_to_keep: Number of the newest checkpoints in `save_folder` to keep; older ones
            are deleted once a new one is committed. -1 keeps all.
        save_retention: Policies of `hocket.ckpt.torch` that keep further checkpoints: `KeepBest`,
            `KeepEvery`, `KeepLast`, or several. `KeepBest` takes a metric's name in the log.
        save_overwrite: Whether a checkpoint may replace another one of the same name. If False, `fit` raises
            at its start if `save_folder` has checkpoints later than the present time of the training.
        load_path: A checkpoint to start from: a path or URI. A path that ends in `latest` is the newest
            checkpoint in its folder. From a checkpoint of another program (safetensors, `torch.save`, a
            distributed checkpoint of torch), the weights are loaded.
        load_weights_only: Whether to load the model alone from `load_path`; the run then starts at time 0.
        load_strict_model_weights: Whether a name that only the model or only the checkpoint has is an error.
        load_ignore_keys: Parts of the run that are not loaded, as `save_ignore_keys`; `rng` for the random
            generators.
        load_exclude_algorithms: Class names of algorithms whose state is not loaded.
        load_object_store: The store that has `load_path`, if that is not a complete URI: an object with
            `get_uri(name)`, `download_object(name, filename)` or `download_file(name, destination)`.
        load_progress_bar: Whether to print a line that names the checkpoint before it is loaded.
        autoresume: Whether to start from the newest committed checkpoint in `save_folder`, if there is one.
        fsdp_config: The sharding settings of `hocket-dist`: a dict or its `FSDPConfig`.
        deepspeed_config: A DeepSpeed configuration (a dict, or a JSON file's path) in place of `fsdp_config`.
        parallelism_config: The same settings as `{"fsdp": fsdp_config}`.
        gradient_sync: The microbatches in which ranks sum gradients: `"every"`, `"last"` (which sends the
            least data, and with sharding holds unsharded gradients until then), or `"replicas_last"` (within
            each copy of a sharded model in every microbatch, between the copies in the last one). None for
            `"last"` without sharding; with sharding, for the default of its strategy.
        parallelism: An object that distributes the model, in place of the installed package's.
        checkpoint_store: An object that keeps checkpoints, in place of the installed package's.
        dist_timeout: Seconds to wait for another rank before it counts as lost, also in saves and loads.

    Raises:
        TrainerConfigError: If arguments do not fit together.
        MissingProviderError: If an argument needs a package that is not installed.
        DataError: If the data loader serves other ranks than those that train.
        ResumeError: If the run cannot continue from the checkpoint.

    Example:
        >>> with Trainer(model=model, train_dataloader=loader, max_duration="2ep") as trainer:
        ...     trainer.fit()
    """

    part_classes: ClassVar[PartClasses] = PartClasses()
    """The classes of the state, the engine and the logger; a subclass may extend them."""

    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        prefetch_depth: int = 1,
        auto_shard: bool = True,
        global_train_batch_size: int | BatchSizeWarmupScheduler | None = None,
        eval_dataloader: Any = None,
        eval_interval: TimeInput | IsTime = 1,
        eval_subset_num_batches: int = -1,
        max_duration: TimeInput | None = None,
        loss_fn: Any = None,
        train_step: Any = None,
        steps_to_skip: Any = None,
        optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        algorithms: Any = None,
        algorithm_passes: Any = None,
        callbacks: Any = None,
        profiler: Profiler | None = None,
        loggers: Any = None,
        log_every: int = 1,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: Any = "stderr",
        console_log_interval: TimeInput | IsTime = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        python_log_level: str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        precision_config: Mapping[str, Any] | None = None,
        device_train_microbatch_size: int | str | MicrobatchSearch | None = None,
        accumulate_train_batch_on_tokens: bool = True,
        gradient_clipping: float | Mapping[str, Any] | GradientClippingConfig | None = None,
        nonfinite_loss: str = "raise",
        compile_config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        deterministic_mode: bool = False,
        gc_interval: int | None = None,
        fast_dev_run: bool | int = False,
        overfit_batches: float = 0.0,
        num_sanity_val_steps: int = 0,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}",
        save_latest_filename: str | None = None,
        save_interval: TimeInput | IsTime = "1ep",
        save_async: bool = False,
        save_weights_only: bool = False,
        save_ignore_keys: Any = None,
        save_metrics: bool = False,
        save_num_checkpoints_to_keep: int = -1,
        save_retention: Any = (),
        save_overwrite: bool = False,
        load_path: str | os.PathLike[str] | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_ignore_keys: Any = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        load_object_store: Any = None,
        load_progress_bar: bool = True,
        autoresume: bool = False,
        fsdp_config: Any = None,
        deepspeed_config: Any = None,
        parallelism_config: Mapping[str, Any] | None = None,
        gradient_sync: GradientSync | None = None,
        parallelism: Parallelism | None = None,
        checkpoint_store: CheckpointStore | None = None,
        dist_timeout: float = 300.0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._is_closed = False
        self._targets = FitTargets()
        # All parts that are made here are closed in reverse order, by `close` or if the setup fails.
        with ExitStack() as self._made:
            self._config = TrainerConfig.of(arguments)
            self._run = assemble(self._config, self._made, self._targets.register, self.part_classes)
            self._made = self._made.pop_all()

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._run.state

    @property
    def logger(self) -> Logger:
        """The logger of the run."""
        return self._run.logger

    @property
    def engine(self) -> Engine:
        """The engine of the run, which fires events."""
        return self._run.engine

    def fit(
        self,
        duration: TimeInput | None = None,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        reset_time: bool = False,
        schedulers: Scheduler | LRScheduler | Sequence[Scheduler | LRScheduler] | None = None,
        scale_schedule_ratio: float | None = None,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_subset_num_batches: int = -1,
        eval_interval: TimeInput | IsTime = 1,
        device_train_microbatch_size: int | str | MicrobatchSearch | None = None,
        precision: str | None = None,
    ) -> None:
        """Train until `max_duration`, or for `duration` from here.

        Under `autoresume`, each call continues the same call of the run that is resumed, the first call its
        first call, and so on. The duration counts from the beginning of the call that is continued, and a
        call that had finished returns at once.

        SIGTERM on any rank ends the training on all ranks at the next step boundary: the trainer saves and is
        closed, and `fit` raises `SystemExit` with 143.

        Args:
            duration: The additional training; a bare number counts epochs. Sets `state.max_duration`.
            train_dataloader: The data from here on, in place of the trainer's; a new epoch begins.
            train_dataloader_label: The name of that data.
            train_subset_num_batches: Number of batches in an epoch from here on; -1 for all.
            spin_dataloaders: As for the trainer, in place of its setting.
            reset_time: Whether to start again at time 0; the optimizers keep their state.
            schedulers: Schedules from here on, in place of those of the trainer.
            scale_schedule_ratio: A factor by which `duration` (if None, the trainer's `max_duration`) and the
                schedules are stretched, in place of the trainer's.
            step_schedulers_every_batch: As for the trainer, in place of its setting.
            eval_dataloader: As for the trainer, in place of its evaluators.
            eval_subset_num_batches: For `eval_dataloader`.
            eval_interval: For `eval_dataloader`.
            device_train_microbatch_size: Number of samples in a microbatch from here on; `"auto"` measures
                again.
            precision: The precision from here on; not for a sharded model.

        Raises:
            TrainerConfigError: If there is no data or no duration, or the trainer is closed.
            DurationReachedError: If the training has already reached its duration, without `autoresume`.
        """
        given = FitConfig(**{name: value for name, value in locals().items() if name != "self"})
        self._check_open()
        self._config = given.change(self._config)
        loader = prepare_fit(self._run, self._config, given, self._targets, self._made)
        if loader is None:
            return
        try:
            train_run(self._run, self._config, loader)
        except BaseException as error:
            self._close_after(error)
            raise

    def trace(self, *, live: bool | TextIO = False) -> Trace:
        """Record the calls at each event from here on, with their changes and durations.

        Args:
            live: Whether to print a line for each change as it happens, on the standard error stream or to
                an open text file.

        Returns:
            The record, whose text is a table; `stop()` ends it.
        """
        stream = None if live is False else sys.stderr if live is True else live
        return Trace(self.engine, self.state, live=stream)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model as it is; the results are in `state.eval_metrics` and in the log.

        Collective with several ranks. An evaluation does not affect the training that follows.

        Args:
            eval_dataloader: As for the trainer; None for the trainer's evaluators.
            subset_num_batches: Number of batches of each rank; -1 for all, or as each evaluator states.

        Raises:
            TrainerConfigError: If there is nothing to evaluate on, or the trainer is closed.
            DataError: If a loader yields nothing.
        """
        self._check_open()
        self._run.evaluation.run_standalone(eval_dataloader, subset_num_batches)
        self.logger.flush()

    def predict(
        self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """Return the model's outputs over a loader, on the CPU, one item for each batch of this rank.

        Collective with several ranks. See `hocket.trainer.evaluation.prediction.predict`.

        Args:
            dataloader: A loader of this rank's batches, as `model.forward` takes them; or a `DataSpec`.
            subset_num_batches: Number of batches; -1 for all.
            return_outputs: Whether to return the outputs; if False, the list is empty, and callbacks can read
                `state.outputs` at `PREDICT_BATCH_END`.

        Raises:
            TrainerConfigError: If the trainer is closed.
            DataError: If the loader yields nothing.
        """
        self._check_open()
        return predict(
            self.state,
            self.engine,
            self._run.precision,
            dataloader,
            subset_num_batches=subset_num_batches,
            return_outputs=return_outputs,
            auto_shard=self._config.data.auto_shard,
        )

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}", *, weights_only: bool = False) -> None:
        """Save a checkpoint, and wait until it is committed. Collective.

        Args:
            name: The checkpoint's path or URI, or its name in `save_folder`, with fields as in
                `save_filename`.
            weights_only: Whether to save the model and the time alone.

        Raises:
            TrainerConfigError: If the trainer is closed, or a batch was fetched ahead, as in a callback
                during `fit`; `save_checkpoint_to_save_folder` then saves at the next boundary.
        """
        self._check_open()
        save_once(self._run, self._config, name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint in `save_folder`, now or, during `fit`, at the next boundary. Collective.

        Raises:
            TrainerConfigError: If the trainer is closed, or there is no `save_folder`.
        """
        self._check_open()
        save_soon(self._run, self._config)

    def export_for_inference(
        self,
        save_path: str | os.PathLike[str],
        *,
        save_format: str = "torch_export",
        sample_input: Any = None,
        transforms: Callable[[nn.Module], nn.Module] | None = None,
        dynamic_batch: bool = True,
    ) -> Path:
        """Write the model as a program that runs without its source; see `hocket.trainer.models.export`.

        Args:
            save_path: The file, such as `"model.pt2"` or `"model.onnx"`.
            save_format: `"torch_export"` or `"onnx"`.
            sample_input: A batch as `forward` takes it; the last batch of training by default.
            transforms: A function that changes a copy of the model before it is exported.
            dynamic_batch: Whether the first dim of every tensor in the batch may vary.

        Returns:
            The path of the file.

        Raises:
            TrainerConfigError: If the format is unknown, there is no batch, or the model is sharded.
        """
        return export_for_inference(
            self.state.model,
            save_path,
            sample_input=self.state.batch if sample_input is None else sample_input,
            save_format=save_format,
            transforms=transforms,
            dynamic_batch=dynamic_batch,
        )

    @property
    def saved_checkpoints(self) -> list[str]:
        """The names of the committed checkpoints in `save_folder`, the newest last."""
        checkpointer = self._run.checkpointer
        entries = () if checkpointer is None else checkpointer.store.list()
        return [entry.name for entry in entries if entry.status == "committed"]

    def close(self) -> None:
        """Close callbacks and loggers, wait for a save in progress, and release all parts of the run.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrainerConfigError("this trainer is closed; make a new one, with `load_path` to go on")

    def _close_after(self, error: BaseException) -> None:
        """Close while `error` propagates; a second error is added to it as a note and does not hide it."""
        try:
            self.close()
        except Exception as second:  # noqa: BLE001 - it is reported with the first
            error.add_note(f"and while closing: {type(second).__name__}: {second}")
