"""Conversions and checks of single arguments of `Trainer`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver
from hocket.trainer.checks import (
    as_list,
    check_choice,
    check_count,
    check_instances,
    check_keys,
    refuse_class,
    refuse_classes,
)
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.interval import every
from hocket.trainer.optim import ForOptimizer, MetricScheduler
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.process.extras import require_compiler
from hocket.trainer.step.microbatch_search import MicrobatchSearch
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time

_AXES = {"fsdp", "fsdp2", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"}


def as_optimizers(given: Any) -> list[Optimizer]:
    """Return one optimizer, several, or a dict of them by name, as a list.

    Raises:
        TrainerConfigError: If something else is among them.
    """
    if isinstance(given, Mapping):
        given = list(given.values())
    optimizers = [given] if isinstance(given, Optimizer) else as_list(given)
    for optimizer in optimizers:
        refuse_class("optimizers", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise TrainerConfigError(
                f"`optimizers` has a `{type(optimizer).__name__}`; expected a `torch.optim.Optimizer`, "
                "several, or a dict of them by name"
            )
    return optimizers


def check_trains(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Refuse optimizers that hold no parameter of the model.

    Raises:
        TrainerConfigError: If no optimizer holds one.
    """
    optimizer_ids = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    model_ids = {id(parameter) for parameter in model.parameters()}
    if optimizer_ids and model_ids and not optimizer_ids & model_ids:
        raise TrainerConfigError(
            f"`optimizers` hold no parameter of `model`, a `{type(model).__name__}`, so nothing would be "
            "trained; make them of `model.parameters()` of the very object that is passed as `model`"
        )


def as_schedulers(given: Any, optimizers: Any) -> list[Any]:
    """Return one schedule, several, or a dict of them by optimizer name, as a list.

    Raises:
        TrainerConfigError: If names are given, and are not those of the optimizers.
    """
    if not isinstance(given, Mapping):
        return as_list(given)
    names = list(optimizers) if isinstance(optimizers, Mapping) else []
    if unknown := sorted(set(map(str, given)) - set(names)):
        raise TrainerConfigError(
            f"`schedulers` names {unknown}, and `optimizers` has the names {names}; expected the same names"
        )
    for schedules in given.values():
        refuse_classes("schedulers", schedules)
    return [
        ForOptimizer(schedule, optimizers[name])
        if not isinstance(schedule, (LRScheduler, MetricScheduler))
        else schedule
        for name, schedules in given.items()
        for schedule in as_list(schedules)
    ]


def as_duration(given: TimeInput) -> Time:
    """Return a length of training, in a unit that training advances.

    Raises:
        TrainerConfigError: If it has another unit, or is not positive.
    """
    length = ensure_time(given, TimeUnit.EPOCH)
    if length.unit in (TimeUnit.SECOND, TimeUnit.DURATION) or length.value <= 0:
        raise TrainerConfigError(
            f"the duration `{length}` cannot end a training; expected a positive number of `ep`, `ba`, "
            "`sp`, `tok` or `iter`"
        )
    return length


def check_callbacks(name: str, given: Any) -> None:
    """Refuse callbacks that are no instances, or that no event calls.

    Raises:
        TrainerConfigError: If there is one.
    """
    check_instances(name, given)
    for item in () if isinstance(given, Iterator) else as_list(given):
        if isinstance(item, CheckpointSaver) or hasattr(item, "run_event") or hasattr(item, "log_metrics"):
            continue
        if not any(hasattr(item, event.value) for event in Event):
            raise TrainerConfigError(
                f"`{name}` has a `{type(item).__name__}`, which has no method that is called at an event, "
                "such as `batch_end(state, logger)`; expected instances of `Callback`"
            )


def check_class_names(name: str, given: Any) -> None:
    """Refuse what is no list of names of classes.

    Raises:
        TrainerConfigError: If it is a text, or has something other than texts.
    """
    if isinstance(given, str) or not all(isinstance(one, str) for one in as_list(given)):
        raise TrainerConfigError(
            f"`{name}` is {given!r}; expected a list of names of classes, such as `['EMA']`"
        )


def check_microbatch_size(name: str, size: Any) -> None:
    """Refuse a microbatch size that is neither a number of samples nor the search for one.

    Raises:
        TrainerConfigError: If it is neither.
    """
    if size is None or MicrobatchSearch.of(size) is not None:
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TrainerConfigError(
            f"`{name}` is `{size!r}`; expected a number of samples above 0, `'auto'` "
            "or a `MicrobatchSearch` for one that fits, or None for the whole batch"
        )


def check_seed(name: str, seed: Any) -> None:
    """Refuse a seed that torch's generators do not take.

    Raises:
        TrainerConfigError: If it is not a whole number of 64 bits.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not -(2**63) <= int(seed) < 2**63:
        raise TrainerConfigError(
            f"`{name}` is {seed!r}; expected a whole number of 64 bits, or None to draw one"
        )


def check_global_batch_size(name: str, size: Any) -> None:
    """Refuse a global batch size that is neither a number of samples nor a schedule of it.

    Raises:
        TrainerConfigError: If it is neither.
    """
    if not isinstance(size, BatchSizeWarmupScheduler):
        check_count(name, size)


def check_compile_config(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options that `torch.compile` does not have, and a compiler that lacks a package.

    Raises:
        TrainerConfigError: If there is such an option.
        MissingExtraError: If torch cannot compile without setuptools, which is not installed.
    """
    known = inspect.signature(torch.compile).parameters
    check_keys(name, given, [option for option in known if option != "model"])
    if given.get("backend", "inductor") == "inductor":
        require_compiler(name)


def check_run_name(name: str, given: str) -> None:
    """Refuse an empty name.

    Raises:
        TrainerConfigError: If it is empty.
    """
    if given == "":
        raise TrainerConfigError(f"`{name}` is empty; expected a name, or None for one made of the time")


def check_log_level(name: str, level: str) -> None:
    """Refuse an unknown level of a Python logger, in any case.

    Raises:
        TrainerConfigError: If it is unknown.
    """
    check_choice(name, level.lower(), ("debug", "info", "warning", "error", "critical"))


def check_interval(name: str, given: Any) -> None:
    """Refuse a value that is neither an interval of training nor a function `(state, event) -> bool`."""
    try:
        every(given)
    except (TypeError, ValueError) as error:
        raise TrainerConfigError(
            f"`{name}` is {given!r}; expected an interval such as '10ba', or a function: {error}"
        ) from error


def check_timeout(name: str, seconds: Any) -> None:
    """Refuse a timeout of no time.

    Raises:
        TrainerConfigError: If it is not positive.
    """
    if not seconds > 0:
        raise TrainerConfigError(f"`{name}` is {seconds!r}; expected seconds above 0")


def check_fast_dev_run(name: str, num: Any) -> None:
    """Refuse a `fast_dev_run` that is neither a number of batches nor a boolean.

    Raises:
        TrainerConfigError: If it is neither.
    """
    if not isinstance(num, int) or num < 0:
        raise TrainerConfigError(
            f"`{name}` is {num!r}; expected True for one batch, a number of batches, or False"
        )


def check_overfit_batches(name: str, share: Any) -> None:
    """Refuse `overfit_batches` that are neither a number of batches nor a share of them.

    Raises:
        TrainerConfigError: If they are neither.
    """
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= (1 if isinstance(share, float) else math.inf):
        raise TrainerConfigError(
            f"`{name}` is {share!r}; expected a whole number of batches, or a share of them from 0.0 to 1.0"
        )


def check_sanity_steps(name: str, steps: Any) -> None:
    """Refuse `num_sanity_val_steps` that are no number of batches.

    Raises:
        TrainerConfigError: If they are none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < -1:
        raise TrainerConfigError(
            f"`{name}` is {steps!r}; expected a number of batches, -1 for all, or 0 for none"
        )


def one_config(fsdp_config: Any, parallelism_config: Any) -> Any:
    """Return the sharding configuration, whichever of the two arguments it was given in.

    Raises:
        TrainerConfigError: If both arguments are given, or the configuration has an unknown key.
    """
    if parallelism_config is None:
        return fsdp_config
    if fsdp_config is not None:
        raise TrainerConfigError("`fsdp_config` and `parallelism_config` are both set; state one of them")
    if not isinstance(parallelism_config, Mapping):
        return parallelism_config
    if unknown := sorted({str(key).lower() for key in parallelism_config} - _AXES):
        raise TrainerConfigError(
            f"`parallelism_config` has the unknown keys {unknown}; expected some of {sorted(_AXES)}"
        )
    return dict(parallelism_config) if set(parallelism_config) != {"fsdp"} else parallelism_config["fsdp"]


def scaled_duration(length: Time, ratio: float) -> Time:
    """Return a duration stretched by the scale schedule ratio, rounded down.

    Raises:
        TrainerConfigError: If the ratio is not positive, or nothing is left of the duration.
    """
    if not 0.0 < ratio < math.inf:
        raise TrainerConfigError(f"`scale_schedule_ratio` is {ratio}; expected a positive number")
    scaled = length if ratio == 1.0 else length * ratio
    if scaled.value <= 0:
        raise TrainerConfigError(
            f"`scale_schedule_ratio` ({ratio}) leaves nothing of the duration `{length}`; use a larger ratio"
        )
    return scaled


def subset_or_none(name: str, value: Any) -> int | None:
    """Return a number of batches; None for all of them, given as -1.

    Raises:
        TrainerConfigError: If it is neither -1 nor positive.
    """
    if value == -1:
        return None
    check_count(name, value)
    number: int = value
    return number
