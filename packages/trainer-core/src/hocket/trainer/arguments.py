"""What the trainer makes of its arguments, and which it refuses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.state import State
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time


def as_list(given: Any) -> list[Any]:
    """None, one thing or several, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def as_duration(given: TimeInput) -> Time:
    """A length of training, in a unit that training advances.

    Raises:
        TrainerConfigError: If it is none.
    """
    length = ensure_time(given, TimeUnit.EPOCH)
    if length.unit in (TimeUnit.SECOND, TimeUnit.DURATION) or length.value <= 0:
        raise TrainerConfigError(
            f"the duration `{length}` cannot end a training; expected a positive number of `ep`, `ba`, "
            "`sp`, `tok` or `iter`"
        )
    return length


def check_model(model: Any) -> None:
    """Refuse what is no model with a loss.

    Raises:
        TrainerConfigError: If it is none.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "loss", None)):
        raise TrainerConfigError(
            f"`model` is a `{type(model).__name__}`; expected a `torch.nn.Module` with `forward(batch)` and "
            "`loss(outputs, batch)`, such as a `hocket.trainer.models.ComposerModel`"
        )


def number_to_keep(number: Any) -> int | None:
    """How many checkpoints stay; None for all of them, which -1 says.

    Raises:
        TrainerConfigError: If it is neither -1 nor positive.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < -1 or number == 0:
        raise TrainerConfigError(
            f"`save_num_checkpoints_to_keep` is {number!r}; expected a number from 1 on, or -1 to keep all"
        )
    return None if number == -1 else number


def check_microbatch_size(size: Any) -> None:
    """Refuse what is no number of samples.

    Raises:
        TrainerConfigError: If it is none.
    """
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise TrainerConfigError(
            f"`device_train_microbatch_size` is `{size!r}`; expected a number of samples above 0, or "
            "None for the whole batch"
        )


def one_config(fsdp_config: Any, parallelism_config: Mapping[str, Any] | None) -> Any:
    """The configuration of sharding, whichever argument it was given in.

    Raises:
        TrainerConfigError: If both were, or there are keys besides `fsdp`.
    """
    if parallelism_config is None:
        return fsdp_config
    if fsdp_config is not None:
        raise TrainerConfigError("`fsdp_config` and `parallelism_config` are both set; state one of them")
    if unknown := sorted(set(parallelism_config) - {"fsdp"}):
        raise TrainerConfigError(f"`parallelism_config` has the unknown keys {unknown}; expected `fsdp`")
    return parallelism_config.get("fsdp", {})


def keep_initial_rates(state: State) -> None:
    """Note the learning rates that schedules multiply, so that a checkpoint has them from the start.

    Raises:
        TypeError: If a schedule is one of torch's, or none.
    """
    for scheduler in state.schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or not callable(scheduler):
            raise TypeError(
                f"`schedulers` has a `{type(scheduler).__name__}`; expected callables `(state, ssr=1.0) -> "
                "multiplier`, such as those of `hocket.trainer.optim` (torch's count steps of their own)"
            )
    if state.schedulers:
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))


def be_deterministic(device: torch.device) -> None:
    """Have torch use deterministic kernels only, in the whole process."""
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def made_up_name(made_at: int) -> str:
    """A run's name of the time at which it was made, in seconds since 1970."""
    return time.strftime("run-%Y%m%d-%H%M%S", time.gmtime(made_at))
