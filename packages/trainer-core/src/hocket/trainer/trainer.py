"""`Trainer`: turns arguments into the parts of a run, and runs them."""

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

from hocket.trainer.assembly import assemble
from hocket.trainer.configs import TrainerConfig
from hocket.trainer.engine import Engine
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.export import export_for_inference
from hocket.trainer.fit_setup import FitConfig, prepare_fit, train_parts
from hocket.trainer.fit_targets import FitTargets
from hocket.trainer.gradient_clipping import GradientClippingConfig
from hocket.trainer.interval import IsTime
from hocket.trainer.logger import Logger
from hocket.trainer.microbatch_search import MicrobatchSearch
from hocket.trainer.optim import Scheduler
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.parts import PartClasses
from hocket.trainer.prediction import predict
from hocket.trainer.protocols import CheckpointStore, GradientSync, Parallelism
from hocket.trainer.state import State
from hocket.trainer.time import TimeInput
from hocket.trainer.trace import Trace

if TYPE_CHECKING:
    from hocket.trainer.profiler import Profiler


class Trainer:
    """Trains a model for a duration, evaluates it, and saves and continues from checkpoints.

    In a job of several ranks every rank makes the same trainer, and calls the same methods. What a rank
    raises leaves its process; the others are ended by the launcher, or by `dist_timeout`.

    Args:
        model: A module with `forward(batch)` and `loss(outputs, batch)`, as `ComposerModel` states them; or
            any module, with `loss_fn` or with an output that has a `loss`.
        loss_fn: `(outputs, targets) -> loss`, or `(outputs, batch) -> loss` with that parameter name, for a
            model without a `loss` of its own.
        train_step: How a batch becomes an update, instead of the standard step: an object with
            `compute_gradients(batch)` and `update()`, a class that takes the standard step, or a function
            `(state, batch) -> loss` that leaves gradients. See `hocket.trainer.step`.
        steps_to_skip: Steps whose data is fetched and not trained on, to pass bad data when a run is repeated
            from a checkpoint: numbers of batches as in the log, ranges, or texts such as `"1200-1250"`.
        train_dataloader: Yields this rank's batches; or a `DataSpec`, or a dict of its arguments.
        train_dataloader_label: The name of the training data in `state.dataloader_label`.
        train_subset_num_batches: The most batches of an epoch; -1 for all.
        spin_dataloaders: Whether a loader without a state of its own is brought to its place in a resumed
            epoch by fetching and discarding batches; False starts the epoch's data anew.
        prefetch_depth: How many batches are fetched and copied to the device ahead of their step; 0 for none.
            At most 1 in a run that saves checkpoints.
        auto_shard: With several ranks, give a plain `DataLoader` with torch's own sampler a
            `DistributedSampler`, so that each rank has its own samples.
        global_train_batch_size: Samples of all ranks together in each step, in place of the loader's
            `batch_size`; a plain `DataLoader` then yields the same global batches on any number of ranks. A
            `BatchSizeWarmupScheduler` lets them grow.
        eval_dataloader: Yields this rank's batches to evaluate on; or a `DataSpec`, an `Evaluator`, or a list
            of `Evaluator`s.
        eval_interval: How often to evaluate: a number of epochs, a time string such as `"100ba"`, a `Time`,
            or a callable `(state, event) -> bool`, asked at the end of each batch, epoch and fit, with the
            same answer on every rank. An evaluation also follows the end of a fit that is not at an interval.
            0 for no evaluation but by `eval`.
        eval_subset_num_batches: How many batches of each rank to evaluate; -1 for all.
        max_duration: When training ends: `"2ep"`, `"100ba"`, `"1e9tok"`; a bare number counts epochs.
        optimizers: One or several, which all step each batch, or a dict of them by name; `AdamW` with a
            learning rate of 0.001 if None.
        schedulers: Callables `(state, ssr) -> multiplier` of the learning rates, such as those of
            `hocket.trainer.optim`, or torch's `LRScheduler`s. Their multipliers multiply.
            With a dict of optimizers, a dict of the same names gives each its own.
        scale_schedule_ratio: A factor by which `max_duration` and the schedules are stretched.
        step_schedulers_every_batch: Whether schedules advance with each batch, or with each epoch; None for
            batches, but epochs for torch's schedulers.
        algorithms: Training methods.
        algorithm_passes: Functions `(algorithms, event) -> algorithms` that change the order in which
            algorithms run; a pair (function, index) places one among the default passes.
        callbacks: Called at events.
        profiler: A `hocket.trainer.profiler.Profiler`, which records batches and reads them in words.
        loggers: Where numbers go.
        log_every: Batches between two logged losses.
        run_name: Made up from the time if None.
        progress_bar: Whether to show one.
        log_to_console: Whether to print the numbers as lines.
        console_stream: `"stdout"`, `"stderr"` or an open text file, for these lines.
        console_log_interval: How often to print a line.
        log_traces: Whether to report to the loggers which algorithms were applied at which events.
        auto_log_hparams: Whether to log these arguments as hyperparameters.
        python_log_level: Level of the Python loggers of `hocket`, such as `"info"`; None leaves them alone.
        device: `"cpu"`, `"gpu"` or a torch device; a GPU if there is one.
        precision: `"fp32"`, `"amp_bf16"`, `"amp_fp16"`, or `"amp_fp8"` with Transformer Engine; bf16 on a GPU
            that has it, else fp32.
        precision_config: Arguments of Transformer Engine's `DelayedScaling`, for `"amp_fp8"`.
        device_train_microbatch_size: Samples that go through the model at once; None for a rank's whole
            batch. `"auto"` measures before the first step which size fits, and leaves a tenth of the memory
            free; a `MicrobatchSearch` changes how. The update does not depend on the size.
        accumulate_train_batch_on_tokens: Whether a sample weighs as many labels as it has that are not
            ignored, where labels are sequences; False weighs every sample alike.
        gradient_clipping: The largest norm of all gradients together; or a `GradientClippingConfig`, or a
            dict of its arguments, to limit each element instead. The norm is logged as `l2_norm/grad/global`.
        nonfinite_loss: The policy for a NaN or infinite loss: `"raise"` ends the run with the step and rank
            named, `"skip"` leaves the update out on every rank, `"ignore"` trains on.
        compile_config: Arguments of `torch.nn.Module.compile` for the model; `{}` for its defaults, None
            for no compilation. Later recompilations are reported, as by `CompileMonitor`.
        seed: Rank r's random generators start from `seed + r`; drawn from torch's generator if None.
        deterministic_mode: Have torch use deterministic kernels only.
        gc_interval: Batches between two runs of Python's garbage collector, which then run on all ranks after
            the same batch, and at no other time of a fit; None leaves the time to the collector. What is
            there when a fit with an interval starts, or the first fit of a process, is frozen until its end.
        fast_dev_run: True, or a number of batches, tries a script out: each `fit` ends after one epoch of so
            many batches, each evaluation has as many, and nothing is saved or sent to loggers.
        overfit_batches: Train on the first batches of the loader again and again, a number (int) or share
            (float) of them, unshuffled, and evaluate on as many: a model and loop that work overfit them.
        num_sanity_val_steps: Batches of each evaluator that the first `fit` of a fresh run evaluates before
            it trains, without events and results, to find errors early; -1 for all of them.
        save_folder: Where checkpoints go: a path or URI, in which `{run_name}` is filled in.
        save_filename: A checkpoint's name in it, with fields such as `{epoch}` and `{batch}`.
        save_latest_filename: Accepted for Composer's users: a store lists its newest checkpoint by itself.
        save_interval: How often; also at the end of training.
        save_async: Whether training goes on while a checkpoint is written.
        save_weights_only: Save the model and the time alone.
        save_ignore_keys: Parts to leave out: globs such as `model/head.*`, or a function that edits the tree.
        save_metrics: Whether checkpoints list the last values of the metrics, in their `user`, each under its
            name in the log, such as `metrics/eval/MulticlassAccuracy`. A run on as many ranks that goes on
            from one has what they measured in `state.train_metrics` and `state.eval_metrics`.
        save_num_checkpoints_to_keep: How many of the newest checkpoints in `save_folder` stay; older ones go
            once a new one is committed. -1 keeps all.
        save_retention: Policies of `hocket.ckpt.torch` that say which others stay: `KeepBest`, `KeepEvery`,
            `KeepLast`, or several. `KeepBest` takes a metric's name in the log.
        save_overwrite: Whether a checkpoint may replace another one of the same name. False refuses, at the
            start of `fit`, a `save_folder` with checkpoints that are later than the training has come to.
        load_path: A checkpoint to start from: a path or URI. One that ends in `latest` is the newest in its
            folder. A checkpoint of another program (safetensors, `torch.save`, a distributed checkpoint of
            torch) gives its weights.
        load_weights_only: Load the model alone from `load_path`; the run starts at time 0.
        load_strict_model_weights: Refuse names that only the model or only the checkpoint has.
        load_ignore_keys: Parts of the run that are not loaded, as `save_ignore_keys`.
        load_exclude_algorithms: Class names of algorithms whose state is not loaded.
        load_object_store: The store that has `load_path`, where that is no whole URI: an object with
            `get_uri(name)`, `download_object(name, filename)` or `download_file(name, destination)`.
        load_progress_bar: Whether a line says what is being loaded.
        autoresume: Start from the newest committed checkpoint in `save_folder`, where there is one.
        fsdp_config: How to shard, for `hocket-dist`; a dict or its `FSDPConfig`.
        deepspeed_config: A DeepSpeed configuration (a dict, or a JSON file's path) in place of `fsdp_config`.
        parallelism_config: The same as `{"fsdp": fsdp_config}`.
        gradient_sync: When ranks sum gradients while microbatches accumulate: `"every"` (in each microbatch),
            `"last"` (in the last one, which sends least, and where gradients are sharded holds whole ones
            until then), or `"replicas_last"` (within the copies of a sharded model in each, between them in
            the last). None for `"last"` without sharding, and with it what suits its strategy.
        parallelism: An object that spreads the model, instead of the installed package's.
        checkpoint_store: An object that keeps checkpoints, instead of the installed package's.
        dist_timeout: Seconds to wait for another rank before it counts as lost, in saves and loads too.

    Raises:
        TrainerConfigError: If arguments do not fit together.
        MissingProviderError: If an argument asks for a package that is not installed.
        DataError: If the data loader serves other ranks than those that train.
        ResumeError: If the run cannot go on from the checkpoint.

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
        # Everything that is made here is closed here, the last first: by `close`, and if the setup fails.
        with ExitStack() as self._made:
            self._parts = assemble(
                TrainerConfig.of(arguments), self._made, self._targets.register, self.part_classes
            )
            self._made = self._made.pop_all()

    @property
    def state(self) -> State:
        """The state of the run."""
        return self._parts.state

    @property
    def logger(self) -> Logger:
        """Takes values to log."""
        return self._parts.logger

    @property
    def engine(self) -> Engine:
        """Fires events."""
        return self._parts.engine

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

        Under `autoresume` the first call continues the first call of the run that is resumed, and so on: its
        duration counts from where that call began, and a call that was finished returns at once.

        SIGTERM, sent to any rank, ends the training at the next step boundary on all of them: the trainer
        saves, is closed, and `SystemExit` with 143 leaves `fit`.

        Args:
            duration: How much more; a bare number counts epochs. Sets `state.max_duration`.
            train_dataloader: The data from here on, in place of the trainer's; a new epoch begins.
            train_dataloader_label: Its name.
            train_subset_num_batches: The batches of an epoch from here on; -1 for all.
            spin_dataloaders: As for the trainer, in place of its setting.
            reset_time: Start again at time 0; the optimizers keep their state.
            schedulers: Schedules from here on, in place of those of the trainer.
            scale_schedule_ratio: A factor by which `duration` (if None, the trainer's `max_duration`) and the
                schedules are stretched, in place of the trainer's.
            step_schedulers_every_batch: As for the trainer, in place of its setting.
            eval_dataloader: As for the trainer, in place of its evaluators.
            eval_subset_num_batches: For `eval_dataloader`.
            eval_interval: For `eval_dataloader`.
            device_train_microbatch_size: Samples that go through the model at once from here on; `"auto"`
                measures again.
            precision: The precision from here on; not for a sharded model.

        Raises:
            TrainerConfigError: If there is no data or no duration, or the trainer is closed.
            DurationReachedError: If the training is as long as that already, without `autoresume`.
        """
        given = FitConfig(**{name: value for name, value in locals().items() if name != "self"})
        self._check_open()
        loader = prepare_fit(self._parts, given, self._targets, self._made)
        if loader is None:
            return
        try:
            train_parts(self._parts, loader)
        except BaseException as error:
            self._close_after(error)
            raise

    def trace(self, *, live: bool | TextIO = False) -> Trace:
        """Trace from here on what runs at each event, what it changes, and how long it takes.

        Args:
            live: Whether to print a line for each change as it happens, on the standard error stream or to
                an open text file.

        Returns:
            A record whose text is a table; `stop()` ends it.
        """
        stream = None if live is False else sys.stderr if live is True else live
        return Trace(self.engine, self.state, live=stream)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the model as it is; the results are in `state.eval_metrics` and in the log.

        Collective where there are several ranks. The training goes on afterwards as if nothing had been.

        Args:
            eval_dataloader: As `Trainer` takes it; None for the evaluators that the trainer has.
            subset_num_batches: How many batches of each rank; -1 for all, or as each evaluator states.

        Raises:
            TrainerConfigError: If there is nothing to evaluate on, or the trainer is closed.
            DataError: If a loader yields nothing.
        """
        self._check_open()
        self._parts.evaluation.run_standalone(eval_dataloader, subset_num_batches)
        self.logger.flush()

    def predict(
        self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """Return the model's outputs over a loader, on the CPU, one item for each batch of this rank.

        Collective where there are several ranks. See `hocket.trainer.prediction.predict`.

        Args:
            dataloader: Yields this rank's batches, as `model.forward` takes them; or a `DataSpec`.
            subset_num_batches: How many batches; -1 for all.
            return_outputs: False keeps nothing: callbacks take `state.outputs` at `PREDICT_BATCH_END`.

        Raises:
            TrainerConfigError: If the trainer is closed.
            DataError: If the loader yields nothing.
        """
        self._check_open()
        return predict(
            self.state,
            self.engine,
            self._parts.precision,
            dataloader,
            subset_num_batches=subset_num_batches,
            return_outputs=return_outputs,
            auto_shard=self._parts.config.data.auto_shard,
        )

    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}", *, weights_only: bool = False) -> None:
        """Save a checkpoint, and wait until it is committed. Collective.

        Args:
            name: Its path or URI, or its name in `save_folder`, with fields as in `save_filename`.
            weights_only: Save the model and the time alone.

        Raises:
            TrainerConfigError: If the trainer is closed, or a batch was fetched ahead, as in a callback
                during `fit`; `save_checkpoint_to_save_folder` then saves at the next boundary.
        """
        self._check_open()
        self._parts.save_once(name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint in `save_folder`, now or, during `fit`, at the next boundary. Collective.

        Raises:
            TrainerConfigError: If the trainer is closed, or there is no `save_folder`.
        """
        self._check_open()
        self._parts.save_soon()

    def export_for_inference(
        self,
        save_path: str | os.PathLike[str],
        *,
        save_format: str = "torch_export",
        sample_input: Any = None,
        transforms: Callable[[nn.Module], nn.Module] | None = None,
        dynamic_batch: bool = True,
    ) -> Path:
        """Write the model as a program that runs without its source; see `hocket.trainer.export`.

        Args:
            save_path: The file, such as `"model.pt2"` or `"model.onnx"`.
            save_format: `"torch_export"` or `"onnx"`.
            sample_input: A batch as `forward` takes it; the last batch of training by default.
            transforms: Changes a copy of the model before it is exported.
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
        checkpointer = self._parts.checkpointer
        entries = () if checkpointer is None else checkpointer.store.list()
        return [entry.name for entry in entries if entry.status == "committed"]

    def close(self) -> None:
        """Close callbacks and loggers, wait for a save in progress, and release what was made here.

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
