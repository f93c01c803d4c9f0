"""The arguments of `Trainer`: the name, type, default, check and text of each, in one place.

`Trainer` takes the fields of `TrainerSettings`. Settings that belong together are one field, a group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.trainer.checks import check_choice, check_count, check_instances, check_part, number_to_keep
from hocket.trainer.interval import IsTime
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.protocols import CheckpointStore, GradientSync, Parallelism
from hocket.trainer.setup.arguments import (
    check_callbacks,
    check_class_names,
    check_compile_config,
    check_fast_dev_run,
    check_global_batch_size,
    check_interval,
    check_log_level,
    check_microbatch_size,
    check_overfit_batches,
    check_run_name,
    check_sanity_steps,
    check_seed,
    check_timeout,
    subset_or_none,
)
from hocket.trainer.setup.fields import checked, complete, group, once
from hocket.trainer.step.gradient_clipping import GradientClippingConfig
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.step.skipped_steps import step_ranges
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.profiler import Profiler

NONFINITE_POLICIES = ("raise", "skip", "ignore")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """How the loop fetches batches, steps, and is tried out before a long run."""

    prefetch_depth: int = field(default=1, metadata=checked(check_count, least=0))
    """Number of batches that are fetched and copied to the device ahead of their step; 0 for none. At most 1
    in a run that saves checkpoints."""
    auto_shard: bool = True
    """Whether, with several ranks, a plain `DataLoader` with torch's own sampler gets a `DistributedSampler`,
    so that each rank has its own samples."""
    gradient_sync: GradientSync | None = field(
        default=None, metadata=checked(check_choice, get_args(GradientSync))
    )
    """The microbatches in which ranks sum gradients: `"every"`, `"last"` (which sends the least data, and
    with sharding holds unsharded gradients until then), or `"replicas_last"` (within each copy of a sharded
    model in every microbatch, between the copies in the last one). None for `"last"` without sharding; with
    sharding, for the default of its strategy."""
    steps_to_skip: Any = field(default=None, metadata=checked(lambda _, steps: step_ranges(steps)))
    """Steps whose data is fetched and not trained on, such as bad data when a run is repeated from a
    checkpoint: numbers of batches as in the log, ranges, or texts such as `"1200-1250"`."""
    nonfinite_loss: str = field(default="raise", metadata=checked(check_choice, NONFINITE_POLICIES))
    """The policy for a NaN or infinite loss: `"raise"` ends the run with the step and rank named, `"skip"`
    skips the update on every rank, `"ignore"` continues."""
    log_every: int = field(default=1, metadata=checked(check_count))
    """Number of batches between two logged losses."""
    gc_interval: int | None = field(default=None, metadata=checked(check_count))
    """Batches between two runs of Python's garbage collector, which then run on all ranks after the same
    batch, and at no other time of a fit; None leaves the time to the collector. Objects that exist at the
    start of a fit with an interval, or of the first fit of a process, are frozen until its end."""
    fast_dev_run: bool | int = field(default=False, metadata=checked(check_fast_dev_run))
    """True for 1, or a number of batches, to try out a script: each `fit` ends after one epoch of that many
    batches, each evaluation has as many, and nothing is saved or sent to loggers."""
    overfit_batches: float = field(default=0.0, metadata=checked(check_overfit_batches))
    """Number (int) or share (float) of the loader's first batches to train on repeatedly, unshuffled, with as
    many batches for evaluation. A working model and loop overfit them."""
    num_sanity_val_steps: int = field(default=0, metadata=checked(check_sanity_steps))
    """Number of batches of each evaluator that the first `fit` of a fresh run evaluates before it trains,
    without events and results, to find errors early; -1 for all."""

    def __post_init__(self) -> None:
        complete(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingSettings:
    """How checkpoints are written and kept."""

    asynchronous: bool = field(default=False, metadata=once("save_async"))
    """Whether training continues while a checkpoint is written."""
    retention: Any = field(default=(), metadata=once("save_retention"))
    """Policies of `hocket.ckpt.torch` that keep further checkpoints (`KeepBest`, `KeepEvery`, `KeepLast`), or
    that drop the optimizer state of older ones (`Thin`). `KeepBest` takes a metric's name in the log."""
    store: CheckpointStore | None = field(
        default=None,
        metadata=once("checkpoint_store")
        | checked(check_part, "save", expected="an object that keeps checkpoints"),
    )
    """An object that keeps checkpoints, in place of the installed package's."""
    ephemeral: TimeInput | IsTime | None = field(default=None, metadata=checked(check_interval))
    """The interval between copies of the run in the memory of its machine, such as `"10ba"`; None for none.
    Where `hocket-launch --max-restarts` starts the ranks again after a failure, `autoresume` goes on from the
    newest of these copies and of the checkpoints. Two copies have to fit; they are removed at the end."""

    def __post_init__(self) -> None:
        complete(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """The arguments of `Trainer`."""

    model: nn.Module
    """A module with `forward(batch)` and `loss(outputs, batch)`, as `ComposerModel` states them; or any
    module, with `loss_fn` or with an output that has a `loss`."""
    train_dataloader: Any = None
    """A loader of this rank's batches; or a `DataSpec`, or a dict of its arguments."""
    train_dataloader_label: str = "train"
    """The name of the training data in `state.dataloader_label`."""
    train_subset_num_batches: int = field(default=-1, metadata=checked(subset_or_none))
    """Number of batches after which an epoch ends; -1 for all."""
    spin_dataloaders: bool = True
    """Whether a loader without a state of its own is moved to its position in a resumed epoch by fetching and
    discarding batches; False starts the epoch's data anew."""
    global_train_batch_size: int | BatchSizeWarmupScheduler | None = field(
        default=None, metadata=checked(check_global_batch_size)
    )
    """Samples of all ranks together in each step, in place of the loader's `batch_size`; a plain `DataLoader`
    then yields the same global batches on any number of ranks. A `BatchSizeWarmupScheduler` increases the
    size during training."""
    eval_dataloader: Any = None
    """A loader of this rank's batches for evaluation; or a `DataSpec`, an `Evaluator`, or a list of
    `Evaluator`s."""
    eval_interval: TimeInput | IsTime = 1
    """The interval between evaluations: a number of epochs, a time string such as `"100ba"`, a `Time`, or a
    callable `(state, event) -> bool`, called at the end of each batch, epoch and fit, with the same result on
    every rank. An evaluation also follows the end of a fit that is not at an interval. With 0, only `eval`
    evaluates."""
    eval_subset_num_batches: int = -1
    """Number of batches of each rank to evaluate; -1 for all."""
    max_duration: TimeInput | None = None
    """The end of training: `"2ep"`, `"100ba"`, `"1e9tok"`; a bare number counts epochs."""
    loop: LoopSettings | Mapping[str, Any] = field(default=LoopSettings(), metadata=group(LoopSettings))
    """How the loop fetches batches, steps and is tried out: a `LoopSettings`, or a dict of its fields."""
    loss_fn: Any = None
    """`(outputs, targets) -> loss`, or `(outputs, batch) -> loss` with that parameter name, for a model
    without a `loss` of its own."""
    train_step: Any = field(default=None, metadata={"takes_class": True})
    """The update for a batch, in place of the standard step: an object with `compute_gradients(batch)` and
    `update()`, a class that takes the standard step, or a function `(state, batch) -> loss` that computes
    gradients. See `hocket.trainer.step`."""
    optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None
    """One or several optimizers, which all step each batch, or a dict of them by name; None for `AdamW` with
    a learning rate of 0.001."""
    schedulers: Any = None
    """Callables `(state, ssr) -> multiplier` of the learning rates, such as those of `hocket.trainer.optim`,
    or torch's `LRScheduler`s. The multipliers of several schedulers are multiplied. With a dict of
    optimizers, a dict of the same names gives each its own."""
    scale_schedule_ratio: float = 1.0
    """A factor by which `max_duration` and the schedules are stretched."""
    step_schedulers_every_batch: bool | None = None
    """Whether schedules advance with each batch, or with each epoch; None for batches, but epochs for torch's
    schedulers."""
    algorithms: Any = field(default=None, metadata=checked(check_instances, "match", "apply"))
    """Training methods."""
    algorithm_passes: Any = None
    """Functions `(algorithms, event) -> algorithms` that change the order in which algorithms run; a pair
    (function, index) places one among the default passes."""
    callbacks: Any = field(default=None, metadata=checked(check_callbacks))
    """Objects whose methods are called at events."""
    profiler: Profiler | None = field(
        default=None, metadata=checked(check_part, "attach", expected="a `hocket.trainer.profiler.Profiler`")
    )
    """A `hocket.trainer.profiler.Profiler`, which records batches and reports on them in words."""
    loggers: Any = field(default=None, metadata=checked(check_instances, "log_metrics"))
    """The destinations of logged values."""
    run_name: str | None = field(default=None, metadata=checked(check_run_name))
    """The name of the run; None for a name from the time."""
    progress_bar: bool = True
    """Whether to show a progress bar."""
    log_to_console: bool = False
    """Whether to print the logged values as lines."""
    console_stream: Any = "stderr"
    """`"stdout"`, `"stderr"` or an open text file, for these lines."""
    console_log_interval: TimeInput | IsTime = "1ba"
    """The interval between two lines."""
    log_traces: bool = False
    """Whether to report to the loggers which algorithms were applied at which events."""
    auto_log_hparams: bool = False
    """Whether to log these arguments as hyperparameters."""
    python_log_level: str | None = field(default=None, metadata=checked(check_log_level))
    """Level of the Python loggers of `hocket`, such as `"info"`; None keeps it."""
    device: str | torch.device | None = None
    """`"cpu"`, `"gpu"` or a torch device; None for a GPU if there is one, else the CPU."""
    precision: str | None = None
    """`"fp32"`, `"amp_bf16"`, `"amp_fp16"`, or `"amp_fp8"` with Transformer Engine; None for `"amp_bf16"` on
    a GPU that supports bf16, else `"fp32"`."""
    precision_config: Mapping[str, Any] | None = None
    """Arguments of Transformer Engine's `DelayedScaling`, for `"amp_fp8"`."""
    device_train_microbatch_size: int | str | Mapping[str, Any] | MicrobatchSearch | None = field(
        default=None, metadata=checked(check_microbatch_size)
    )
    """Number of samples in a microbatch; None for a rank's whole batch. `"auto"` measures before the first
    step which size fits, with a tenth of the memory left free; a `MicrobatchSearch`, or a dict of its fields,
    changes these settings. The update does not depend on the size."""
    accumulate_train_batch_on_tokens: bool = True
    """Whether the loss weight of a sample is its number of labels that are not ignored, if labels are
    sequences; False gives every sample the same weight."""
    gradient_clipping: float | Mapping[str, Any] | GradientClippingConfig | None = field(
        default=None, metadata=checked(lambda _, given: GradientClippingConfig.of(given))
    )
    """The largest norm of all gradients together; or a `GradientClippingConfig`, or a dict of its arguments,
    to limit each element instead. The norm before clipping is logged as `l2_norm/grad/before_clipping`."""
    compile_config: Mapping[str, Any] | None = field(default=None, metadata=checked(check_compile_config))
    """Arguments of `torch.nn.Module.compile` for the model; `{}` for its defaults, None for no compilation.
    Later recompilations are reported, as by `CompileMonitor`."""
    seed: int | None = field(default=None, metadata=checked(check_seed))
    """The seed, where rank r's random generators start from `seed + r`; None to draw one from torch's
    generator."""
    deterministic_mode: bool = False
    """Whether torch uses deterministic kernels only."""
    save_folder: str | os.PathLike[str] | None = None
    """The folder of the checkpoints: a path or URI, in which `{run_name}` is filled in."""
    save_filename: str = "ep{epoch}-ba{batch}"
    """A checkpoint's name in `save_folder`, with fields such as `{epoch}` and `{batch}`."""
    save_latest_filename: str | None = None
    """Accepted for Composer's users and not used: a store lists its newest checkpoint."""
    save_interval: TimeInput | IsTime = "1ep"
    """The interval between checkpoints; one is also saved at the end of training."""
    save_weights_only: bool = False
    """Whether to save the model and the time alone."""
    save_ignore_keys: Any = None
    """Parts to leave out: globs such as `model/head.*`, or a function that edits the tree."""
    save_metrics: bool = False
    """Whether checkpoints list the last values of the metrics, in their `user`, each under its name in the
    log, such as `metrics/eval/MulticlassAccuracy`. A run that continues from one on as many ranks has the
    metric states in `state.train_metrics` and `state.eval_metrics`."""
    save_num_checkpoints_to_keep: int = field(
        default=-1, metadata=checked(lambda _, number: number_to_keep(number))
    )
    """Number of the newest checkpoints in `save_folder` to keep; older ones are deleted once a new one is
    committed. -1 keeps all."""
    save_overwrite: bool = False
    """Whether a checkpoint may replace another one of the same name. If False, `fit` raises at its start if
    `save_folder` has checkpoints later than the present time of the training."""
    checkpointing: CheckpointingSettings | Mapping[str, Any] = field(
        default=CheckpointingSettings(), metadata=group(CheckpointingSettings)
    )
    """How checkpoints are written and kept: a `CheckpointingSettings`, or a dict of its fields."""
    load_path: str | os.PathLike[str] | None = None
    """A checkpoint to start from: a path or URI. A path that ends in `latest` is the newest checkpoint in its
    folder. From a checkpoint of another program (safetensors, `torch.save`, a distributed checkpoint of
    torch), the weights are loaded."""
    load_weights_only: bool = False
    """Whether to load the model alone from `load_path`; the run then starts at time 0."""
    load_strict_model_weights: bool = True
    """Whether a name that only the model or only the checkpoint has is an error."""
    load_ignore_keys: Any = None
    """Parts of the run that are not loaded, as `save_ignore_keys`; `rng` for the random generators."""
    load_exclude_algorithms: Sequence[str] | None = field(
        default=None, metadata=checked(check_class_names) | {"takes_class": True}
    )
    """Class names of algorithms whose state is not loaded."""
    load_object_store: Any = None
    """The store that has `load_path`, if that is not a complete URI: an object with `get_uri(name)`,
    `download_object(name, filename)` or `download_file(name, destination)`."""
    load_progress_bar: bool = True
    """Whether to print a line that names the checkpoint before it is loaded."""
    autoresume: bool = False
    """Whether to start from the newest committed checkpoint in `save_folder`, if there is one."""
    fsdp_config: Any = None
    """The sharding settings of `hocket-dist`: a dict or its `FSDPConfig`."""
    deepspeed_config: Any = None
    """A DeepSpeed configuration (a dict, or a JSON file's path) in place of `fsdp_config`."""
    parallelism_config: Mapping[str, Any] | None = None
    """The same settings as `{"fsdp": fsdp_config}`."""
    parallelism: Parallelism | None = field(
        default=None,
        metadata=checked(
            check_part, "lay_out", "data_parallel", expected="an object that distributes the model"
        ),
    )
    """An object that distributes the model, in place of the installed package's."""
    dist_timeout: float = field(default=300.0, metadata=checked(check_timeout))
    """Seconds to wait for another rank before it counts as lost, also in saves and loads."""

    def __post_init__(self) -> None:
        complete(self)
