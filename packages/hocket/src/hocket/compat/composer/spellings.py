"""A table of past spellings of Composer's arguments, with the current ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.trainer.data.data_spec import as_data_spec
from hocket.trainer.errors import TrainerConfigError

Convert = Callable[[Any, Mapping[str, Any]], Any]
"""`(value, all arguments) -> value of the new argument`."""


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """An argument's past form.

    Attributes:
        of: The class that takes the argument.
        old: The argument's name in scripts.
        new: The argument in its place; None if the old one has no effect.
        values: Current values by past ones; other values stay.
        convert: Makes the new value from the old one; None if the value stays the same.
        note: The reason why the old argument has no effect, or how the new value is made.
        is_told: Whether the change is warned of; False if it changes nothing for the user.
    """

    of: str
    old: str
    new: str | None
    values: Mapping[Any, Any] = field(default_factory=dict)
    convert: Convert | None = None
    note: str = ""
    is_told: bool = False


def _microbatch_size(number: Any, arguments: Mapping[str, Any]) -> int | str:
    if number == "auto":
        return "auto"
    loader = arguments.get("train_dataloader")
    rows = None if loader is None else getattr(as_data_spec(loader).dataloader, "batch_size", None)
    if not isinstance(number, int) or number < 1 or rows is None:
        raise TrainerConfigError(
            f"`grad_accum` is {number!r} for a data loader with `batch_size` {rows}; expected a number from "
            "1 on and a loader that knows its batch size, or `device_train_microbatch_size=…` in its place"
        )
    return int(-(-rows // number))


def _in_unit(unit: str) -> Convert:
    return lambda number, _: f"{number}{unit}"


def _gradient_sync(strategy: Any, _: Mapping[str, Any]) -> dict[str, str]:
    name = str(getattr(strategy, "value", strategy)).lower()
    if name not in _GRADIENT_SYNC:
        choices = ", ".join(f"`{one}`" for one in _GRADIENT_SYNC)
        raise TrainerConfigError(f"`ddp_sync_strategy` is {strategy!r}; expected one of {choices}")
    return {"gradient_sync": _GRADIENT_SYNC[name]}


_GRADIENT_SYNC = {"single_auto_sync": "last", "multi_auto_sync": "every", "forced_sync": "every"}
_CLASSES = "the number of classes is read from the outputs"
_ONE_FOLDER = "a checkpoint is one folder; it is read from where it is"
_SYNC = (
    "`gradient_sync`: `single_auto_sync` becomes `last`, `multi_auto_sync` and `forced_sync` become `every`"
)
_AT_ONCE = "each line is written at once, by a thread beside the training"
_OWN_METRICS = "training metrics are measured if the model states them"

SPELLINGS = (
    Spelling(of="Trainer", old="precision", new="precision", values={
        "amp": "amp_fp16", "fp16": "amp_fp16", "bf16": "amp_bf16",
    }),
    Spelling(of="Trainer", old="grad_accum", new="device_train_microbatch_size", convert=_microbatch_size,
             note="the rows of a batch by this number, rounded up"),
    Spelling(of="Trainer", old="max_epochs", new="max_duration", convert=_in_unit("ep")),
    Spelling(of="Trainer", old="steps_per_epoch", new="train_subset_num_batches"),
    Spelling(of="Trainer", old="validate_every_n_epochs", new="eval_interval", convert=_in_unit("ep")),
    Spelling(of="Trainer", old="validate_every_n_batches", new="eval_interval", convert=_in_unit("ba")),
    Spelling(of="Trainer", old="load_path_format", new="load_path"),
    Spelling(of="Trainer", old="load_strict", new="load_strict_model_weights"),
    Spelling(of="Trainer", old="save_name_format", new="save_filename"),
    Spelling(of="Trainer", old="save_latest_format", new="save_latest_filename"),
    Spelling(of="Trainer", old="load_chunk_size", new=None, note=_ONE_FOLDER),
    Spelling(of="Trainer", old="load_fsdp_monolith_rank0_only", new=None, note=_ONE_FOLDER),
    Spelling(of="Trainer", old="ddp_sync_strategy", new="loop", convert=_gradient_sync, note=_SYNC),
    Spelling(of="Trainer", old="compute_training_metrics", new=None, note=_OWN_METRICS),
    Spelling(of="fit", old="grad_accum", new="device_train_microbatch_size", convert=_microbatch_size),
    Spelling(of="FileLogger", old="flush_interval", new=None, note=_AT_ONCE),
    Spelling(of="FileLogger", old="buffer_size", new=None, note=_AT_ONCE),
    Spelling(of="MixUp", old="num_classes", new=None, note=_CLASSES),
    Spelling(of="CutMix", old="num_classes", new=None, note=_CLASSES),
    Spelling(of="LabelSmoothing", old="alpha", new="smoothing"),
)  # fmt: skip


def translate(of: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in their current spelling.

    Args:
        of: The class or method that takes the arguments.
        arguments: The arguments as a script gives them.

    Raises:
        TrainerConfigError: If both forms of an argument are given, or a value cannot be converted.
    """
    translated = dict(arguments)
    for row in SPELLINGS:
        if row.of == of and row.old in translated:
            _apply(row, translated)
    return translated


def _apply(row: Spelling, arguments: dict[str, Any]) -> None:
    value = arguments[row.old]
    if row.new == row.old:
        if isinstance(value, str) and value in row.values:
            arguments[row.old] = row.values[value]
            _tell(row, value)
        return
    del arguments[row.old]
    if row.new is None:
        if value is not None:
            _tell(row, value)
        return
    if value is None:
        return
    if arguments.get(row.new) is not None:
        raise TrainerConfigError(f"`{row.old}` and `{row.new}` are both given; leave `{row.old}` out")
    arguments[row.new] = value if row.convert is None else row.convert(value, arguments)


def _tell(row: Spelling, value: Any) -> None:
    if row.is_told:
        warnings.warn(f"`{row.of}({row.old}={value!r})`: {row.note}", stacklevel=5)
