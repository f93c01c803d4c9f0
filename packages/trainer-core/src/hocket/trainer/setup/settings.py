"""The arguments of `Trainer` in frozen groups, checked when made. `Trainer` documents each argument."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, get_args

import torch
from torch import nn

from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver, take_savers
from hocket.trainer.checks import (
    as_list,
    check_choice,
    check_count,
    check_instances,
    check_keys,
    number_to_keep,
)
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.protocols import CheckpointStore, GradientSync, Parallelism
from hocket.trainer.setup.arguments import (
    as_duration,
    check_microbatch_size,
    one_config,
    scaled_duration,
    subset_or_none,
)
from hocket.trainer.setup.deepspeed import with_deepspeed
from hocket.trainer.setup.trial_run import TrialRun, with_trial_run
from hocket.trainer.step.gradient_clipping import GradientClippingConfig
from hocket.trainer.step.losses.losses import as_model
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.step.skipped_steps import step_ranges
from hocket.trainer.time import Time

NONFINITE_POLICIES = ("raise", "skip", "ignore")


class _Group:
    """Base class of the groups of arguments."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Make the group from all arguments of `Trainer`."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Group):
    """The model and how it is updated."""

    model: Any
    loss_fn: Any
    train_step: Any
    steps_to_skip: Any
    optimizers: Any
    schedulers: Any
    scale_schedule_ratio: float
    step_schedulers_every_batch: bool | None
    max_duration: Any
    compile_config: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        step_ranges(self.steps_to_skip)
        if self.compile_config is not None:
            known = inspect.signature(torch.compile).parameters
            check_keys("compile_config", self.compile_config, [name for name in known if name != "model"])

    @property
    def has_compiled_step(self) -> bool:
        """Whether the training step compiles what it runs, so that recompilations are reported."""
        return bool(getattr(getattr(self.train_step, "func", self.train_step), "is_compiled", False))

    def build_model(self) -> nn.Module:
        """Return the model, wrapped where it has no `loss` of its own."""
        return as_model(self.model, self.loss_fn)

    def build_duration(self) -> Time | None:
        """Return the duration, stretched by the scale schedule ratio."""
        if self.max_duration is None:
            return None
        return scaled_duration(as_duration(self.max_duration), self.scale_schedule_ratio)


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Group):
    """The data of training."""

    train_dataloader: Any
    train_dataloader_label: str
    train_subset_num_batches: int
    spin_dataloaders: bool
    prefetch_depth: int
    auto_shard: bool
    global_train_batch_size: Any

    def __post_init__(self) -> None:
        subset_or_none("train_subset_num_batches", self.train_subset_num_batches)
        check_count("prefetch_depth", self.prefetch_depth, least=0)
        size = self.global_train_batch_size
        if size is not None and not isinstance(size, BatchSizeWarmupScheduler):
            check_count("global_train_batch_size", size)

    @property
    def max_batches(self) -> int | None:
        """Maximum number of batches in an epoch; None for all."""
        return subset_or_none("train_subset_num_batches", self.train_subset_num_batches)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_Group):
    """The data of evaluation."""

    eval_dataloader: Any
    eval_interval: Any
    eval_subset_num_batches: int


@dataclass(frozen=True, kw_only=True)
class NumericsConfig(_Group):
    """The device, precision, randomness, the size of a microbatch, and Python's garbage collector."""

    device: str | torch.device | None
    precision: str | None
    precision_config: Mapping[str, Any] | None
    device_train_microbatch_size: Any
    accumulate_train_batch_on_tokens: bool
    gradient_clipping: Any
    nonfinite_loss: str
    loss_scale: Mapping[str, Any] | None
    seed: int | None
    deterministic_mode: bool
    gc_interval: int | None

    def __post_init__(self) -> None:
        if self.gc_interval is not None:
            check_count("gc_interval", self.gc_interval)
        check_microbatch_size(self.device_train_microbatch_size)
        check_choice("nonfinite_loss", self.nonfinite_loss, NONFINITE_POLICIES)
        self.build_clipping()

    @property
    def microbatch_search(self) -> MicrobatchSearch | None:
        """The search for a microbatch size; None where the size is stated."""
        return MicrobatchSearch.of(self.device_train_microbatch_size)

    @property
    def microbatch_size(self) -> int | None:
        """The stated size; None for a whole batch, and until a size is found."""
        return None if self.microbatch_search is not None else self.device_train_microbatch_size

    def build_clipping(self) -> GradientClippingConfig | None:
        """Return the settings of gradient clipping; None for no clipping."""
        given = self.gradient_clipping
        return None if given is None else GradientClippingConfig.of(given)


@dataclass(frozen=True, kw_only=True)
class EventConfig(_Group):
    """The algorithms and callbacks."""

    algorithms: Any
    algorithm_passes: Any
    callbacks: Any
    profiler: Any

    def __post_init__(self) -> None:
        check_instances("algorithms", self.algorithms, "match", "apply")
        check_instances("callbacks", self.callbacks)


_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class LogConfig(_Group):
    """The run's name and its log."""

    run_name: str | None
    loggers: Any
    log_every: int
    progress_bar: bool
    log_to_console: bool
    console_stream: Any
    console_log_interval: Any
    log_traces: bool
    auto_log_hparams: bool
    python_log_level: str | None

    def __post_init__(self) -> None:
        check_count("log_every", self.log_every)
        check_instances("loggers", self.loggers, "log_metrics")
        if self.run_name == "":
            raise TrainerConfigError("`run_name` is empty; expected a name, or None for one made of the time")
        if self.python_log_level is not None:
            check_choice("python_log_level", self.python_log_level.lower(), _LOG_LEVELS)


@dataclass(frozen=True, kw_only=True)
class SaveConfig(_Group):
    """The checkpoints of this run."""

    fast_dev_run: bool | int
    save_folder: str | os.PathLike[str] | None
    save_filename: str
    save_latest_filename: str | None
    save_interval: Any
    save_async: bool
    save_weights_only: bool
    save_ignore_keys: Any
    save_num_checkpoints_to_keep: int
    save_retention: Any
    save_overwrite: bool
    save_metrics: bool
    checkpoint_store: CheckpointStore | None
    savers: tuple[CheckpointSaver, ...]
    """The further series of checkpoints."""

    def __post_init__(self) -> None:
        number_to_keep(self.save_num_checkpoints_to_keep)
        if self.checkpoint_store is not None and (self.retention or self.keep_last is not None):
            raise TrainerConfigError(
                "`checkpoint_store` deletes by policies of its own; state `save_num_checkpoints_to_keep` and "
                "`save_retention` where that store is made, or use `save_folder`"
            )

    @property
    def retention(self) -> tuple[Any, ...]:
        """The retention policies in addition to `keep_last`."""
        return tuple(as_list(self.save_retention))

    @property
    def keep_last(self) -> int | None:
        """Number of checkpoints to keep; None for all."""
        return number_to_keep(self.save_num_checkpoints_to_keep)

    @property
    def is_enabled(self) -> bool:
        """Whether checkpoints are saved."""
        return not self.fast_dev_run and (self.save_folder is not None or self.checkpoint_store is not None)


@dataclass(frozen=True, kw_only=True)
class LoadConfig(_Group):
    """The checkpoint that the run starts from."""

    load_path: str | os.PathLike[str] | None
    load_weights_only: bool
    load_strict_model_weights: bool
    load_ignore_keys: Any
    load_exclude_algorithms: Any
    load_object_store: Any
    load_progress_bar: bool
    autoresume: bool

    def __post_init__(self) -> None:
        if self.load_object_store is not None and self.load_path is None:
            raise TrainerConfigError(
                "`load_object_store` says where `load_path` is, which is not set; set it to the checkpoint's "
                "name in that store"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(_Group):
    """The layout of the model over processes."""

    fsdp_config: Any
    deepspeed_config: Any
    parallelism_config: Mapping[str, Any] | None
    gradient_sync: GradientSync | None
    parallelism: Parallelism | None
    dist_timeout: float

    def __post_init__(self) -> None:
        if self.gradient_sync is not None:
            check_choice("gradient_sync", self.gradient_sync, get_args(GradientSync))
            if self.parallelism is not None:
                raise TrainerConfigError(
                    "`gradient_sync` and `parallelism` are both set; state the policy in the layout itself"
                )
        if not self.dist_timeout > 0:
            raise TrainerConfigError(f"`dist_timeout` is {self.dist_timeout!r}; expected seconds above 0")

    def build_config(self) -> Any:
        """Return the configuration for the parallelism provider."""
        return one_config(self.fsdp_config, self.parallelism_config)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """All arguments of `Trainer`, in groups."""

    model: ModelConfig
    data: DataConfig
    evaluation: EvalConfig
    numerics: NumericsConfig
    events: EventConfig
    log: LogConfig
    save: SaveConfig
    load: LoadConfig
    parallel: ParallelConfig
    trial: TrialRun

    def __post_init__(self) -> None:
        if self.load.autoresume and not self.save.is_enabled:
            raise TrainerConfigError("`autoresume` looks in `save_folder`, which is not set; set it")
        folder = os.fspath(self.save.save_folder or "")
        if self.load.autoresume and "{run_name}" in folder and self.log.run_name is None:
            raise TrainerConfigError(
                f"`autoresume` looks in `save_folder`, which is `{folder}`, and a made-up run name is "
                "another one at each start; set `run_name`"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Group the arguments of `Trainer`.

        Raises:
            TrainerConfigError: If an argument is invalid, or two arguments do not fit together.
        """
        arguments = dict(arguments)
        for name in ("callbacks", "algorithms", "loggers"):
            if isinstance(arguments[name], Iterator):
                arguments[name] = list(arguments[name])  # an iterator can be read only once
        arguments = with_trial_run(take_savers(with_deepspeed(arguments)))
        return cls(
            model=ModelConfig.of(arguments),
            data=DataConfig.of(arguments),
            evaluation=EvalConfig.of(arguments),
            numerics=NumericsConfig.of(arguments),
            events=EventConfig.of(arguments),
            log=LogConfig.of(arguments),
            save=SaveConfig.of(arguments),
            load=LoadConfig.of(arguments),
            parallel=ParallelConfig.of(arguments),
            trial=TrialRun.of(arguments),
        )

    def hyperparameters(self) -> dict[str, Any]:
        """Return every argument by name: plain values as they are, objects by the name of their class."""
        values: dict[str, Any] = {}
        for group in fields(self):
            for field in fields(part := getattr(self, group.name)):
                values[field.name] = _plain(getattr(part, field.name))
        return values


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, (os.PathLike, torch.device, Time)) else type(value).__name__
