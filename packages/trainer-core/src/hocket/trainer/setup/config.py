"""`TrainerConfig`: the arguments of `Trainer` as the run uses them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import nn

from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver, take_savers
from hocket.trainer.checks import as_list, check_uri, number_to_keep
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.replay import Replay
from hocket.trainer.setup.arguments import as_duration, one_config, scaled_duration, subset_or_none
from hocket.trainer.setup.deepspeed import with_deepspeed
from hocket.trainer.setup.replay_setup import with_replay
from hocket.trainer.setup.settings import CheckpointingSettings, LoopSettings, TrainerSettings
from hocket.trainer.setup.trial_run import TrialRun, with_trial_run
from hocket.trainer.step.gradient_clipping import GradientClippingConfig
from hocket.trainer.step.losses.losses import as_model
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.time import Time


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(TrainerSettings):
    """The arguments of `Trainer`, with a DeepSpeed configuration, savers and a trial run worked into them."""

    loop: LoopSettings
    checkpointing: CheckpointingSettings
    savers: tuple[CheckpointSaver, ...] = ()
    """The further series of checkpoints, taken from `callbacks`."""
    loss_scale: Mapping[str, Any] | None = None
    """Options of `torch.amp.GradScaler`, which only a `deepspeed_config` sets."""
    replay: Replay | None = None
    """The replay that the trainer is made within."""

    def __post_init__(self) -> None:
        TrainerSettings.__post_init__(self)
        self._check_layout()
        self._check_checkpoints()

    @classmethod
    def of(cls, settings: TrainerSettings) -> Self:
        """Make the configuration of a run from the arguments of `Trainer`.

        Raises:
            TrainerConfigError: If two arguments do not fit together.
        """
        arguments = {field.name: getattr(settings, field.name) for field in fields(settings)}
        for name in ("callbacks", "algorithms", "loggers"):
            if isinstance(arguments[name], Iterator):
                arguments[name] = list(arguments[name])  # an iterator can be read only once
        return cls(**with_replay(with_trial_run(take_savers(with_deepspeed(arguments)))))

    @property
    def has_compiled_step(self) -> bool:
        """Whether the training step compiles what it runs, so that recompilations are reported."""
        return bool(getattr(getattr(self.train_step, "func", self.train_step), "is_compiled", False))

    @property
    def max_batches(self) -> int | None:
        """Maximum number of batches in an epoch; None for all."""
        return subset_or_none("train_subset_num_batches", self.train_subset_num_batches)

    @property
    def microbatch_search(self) -> MicrobatchSearch | None:
        """The search for a microbatch size; None where the size is stated."""
        return MicrobatchSearch.of(self.device_train_microbatch_size)

    @property
    def microbatch_size(self) -> int | None:
        """The stated size; None for a whole batch, and until a size is found."""
        size = self.device_train_microbatch_size
        return size if isinstance(size, int) else None

    @property
    def trial(self) -> TrialRun:
        """The limits of a trial run."""
        return TrialRun(self.loop)

    @property
    def retention(self) -> tuple[Any, ...]:
        """The retention policies in addition to `keep_last`."""
        return tuple(as_list(self.checkpointing.retention))

    @property
    def keep_last(self) -> int | None:
        """Number of checkpoints to keep; None for all."""
        return number_to_keep(self.save_num_checkpoints_to_keep)

    @property
    def is_saving(self) -> bool:
        """Whether checkpoints are saved."""
        has_place = self.save_folder is not None or self.checkpointing.store is not None
        return has_place and not self.loop.fast_dev_run and self.replay is None

    def build_model(self) -> nn.Module:
        """Return the model, wrapped where it has no `loss` of its own."""
        return as_model(self.model, self.loss_fn)

    def build_duration(self) -> Time | None:
        """Return the duration, stretched by the scale schedule ratio."""
        if self.max_duration is None:
            return None
        return scaled_duration(as_duration(self.max_duration), self.scale_schedule_ratio)

    def build_clipping(self) -> GradientClippingConfig | None:
        """Return the settings of gradient clipping; None for no clipping."""
        given = self.gradient_clipping
        return None if given is None else GradientClippingConfig.of(given)

    def build_layout(self) -> Any:
        """Return the configuration for the parallelism provider."""
        return one_config(self.fsdp_config, self.parallelism_config)

    def set_beside_pipeline(self) -> list[str]:
        """Return the names of the arguments that are set and that do not work with a pipeline."""
        settings = {
            "train_step": self.train_step,
            "compile_config": None if self.compile_config is None else True,
            "profiler": self.profiler,
            "device_train_microbatch_size='auto'": self.microbatch_search,
            "loop.steps_to_skip": self.loop.steps_to_skip,
        }
        return [name for name, value in settings.items() if value]

    def hyperparameters(self) -> dict[str, Any]:
        """Return every argument by name: plain values as they are, objects by the name of their class."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def _check_layout(self) -> None:
        if self.loop.gradient_sync is not None and self.parallelism is not None:
            raise TrainerConfigError(
                "`gradient_sync` and `parallelism` are both set; state the policy in the layout itself"
            )

    def _check_checkpoints(self) -> None:
        if self.checkpointing.store is not None and (self.retention or self.keep_last is not None):
            raise TrainerConfigError(
                "the `store` of `checkpointing` deletes by policies of its own; state "
                "`save_num_checkpoints_to_keep` and `retention` where that store is made, or use "
                "`save_folder`"
            )
        for name, place in (("save_folder", self.save_folder), ("load_path", self.load_path)):
            if place is not None and not os.fspath(place):
                raise TrainerConfigError(
                    f"`{name}` is empty; expected a path, `.` for the working directory, a URI, or None"
                )
        if self.load_path is not None and self.load_object_store is None:
            check_uri("load_path", self.load_path)
        if self.load_object_store is not None and self.load_path is None:
            raise TrainerConfigError(
                "`load_object_store` says where `load_path` is, which is not set; set it to the checkpoint's "
                "name in that store"
            )
        if self.autoresume and not self.is_saving:
            raise TrainerConfigError("`autoresume` looks in `save_folder`, which is not set; set it")
        if self.checkpointing.ephemeral is not None and not (self.autoresume or self.loop.fast_dev_run):
            raise TrainerConfigError(
                "`checkpointing` asks for `ephemeral` copies, which a run that starts again finds by "
                "`autoresume`; set `autoresume=True` and `save_folder`"
            )
        folder = os.fspath(self.save_folder or "")
        if self.autoresume and "{run_name}" in folder and self.run_name is None:
            raise TrainerConfigError(
                f"`autoresume` looks in `save_folder`, which is `{folder}`, and a made-up run name is "
                "another one at each start; set `run_name`"
            )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (LoopSettings, CheckpointingSettings)):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, (os.PathLike, torch.device, Time)) else type(value).__name__
