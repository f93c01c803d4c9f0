"""The parts of the training loop, as `composer.core`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset

from hocket.compat.composer.data_spec import DataSpec, default_split_batch, ensure_data_spec
from hocket.compat.composer.engine import Engine, Trace
from hocket.compat.composer.evaluator import Evaluator
from hocket.compat.composer.signatures import in_order
from hocket.compat.composer.state import State
from hocket.trainer import (
    Algorithm,
    Callback,
    Event,
    Time,
    Timestamp,
    TimeUnit,
)
from hocket.trainer.engine.passes import AlgorithmPass
from hocket.trainer.evaluation.evaluator import Evaluator as _Evaluator
from hocket.trainer.evaluation.evaluator import as_evaluators
from hocket.trainer.precision import Precision as _Numerics
from hocket.trainer.protocols import Stateful as Serializable
from hocket.trainer.time import ensure_time as _ensure_time

ensure_time = in_order(_ensure_time, "maybe_time int_unit", maybe_time="given", int_unit="default_unit")

#: A batch, as a data loader yields it.
Batch: TypeAlias = Any

#: A value of JSON.
JSON: TypeAlias = str | float | int | list[Any] | dict[str, Any] | None


class Precision(StrEnum):
    """Names for `Trainer(precision=…)`."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"


def sort_to_front(items: Sequence[Any], cls: type | tuple[type, ...]) -> list[Any]:
    """Return items with those of a class first, each group in its order."""
    return sorted(items, key=lambda item: not isinstance(item, cls))


def sort_to_back(items: Sequence[Any], cls: type | tuple[type, ...]) -> list[Any]:
    """Return items with those of a class last, each group in its order."""
    return sorted(items, key=lambda item: isinstance(item, cls))


class TrainerMode(StrEnum):
    """Names of a trainer's modes."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class MemoryFormat(StrEnum):
    """Names of torch's memory formats."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"


def get_precision_context(
    precision: str, precision_config: Mapping[str, Any] | None = None, fp8_autocast_enabled: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of forward passes in a precision, on a GPU if there is one.

    Args:
        precision: Name of the precision.
        precision_config: The scaling of fp8; without effect in other precisions.
        fp8_autocast_enabled: False for bf16 in place of fp8.

    Raises:
        TrainerConfigError: If the precision is not supported.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = str(precision)
    if name == Precision.AMP_FP8 and not fp8_autocast_enabled:
        name = str(Precision.AMP_BF16)
    config = precision_config if name == Precision.AMP_FP8 else None
    return _Numerics(name, device, config).forward()


def ensure_evaluator(evaluator: Any, default_metric_names: list[str] | None = None) -> _Evaluator:
    """Return an evaluator unchanged, or make one named `eval` from a data loader."""
    if isinstance(evaluator, _Evaluator):
        return evaluator
    if default_metric_names is not None:
        return Evaluator(label="eval", dataloader=evaluator, metric_names=default_metric_names)
    (made,) = as_evaluators(evaluator)
    return made


__all__ = [
    "JSON",
    "Algorithm",
    "AlgorithmPass",
    "Batch",
    "Callback",
    "DataSpec",
    "Dataset",
    "Engine",
    "Evaluator",
    "Event",
    "MemoryFormat",
    "Precision",
    "Serializable",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "TrainerMode",
    "default_split_batch",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_time",
    "get_precision_context",
    "sort_to_back",
    "sort_to_front",
]
