"""Translation of a DeepSpeed configuration into `FSDPConfig` and arguments of the trainer."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hocket.dist.config.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from hocket.dist.config.deepspeed_keys import (
    AUTOCAST_KEYS,
    BF16_KEYS,
    CHECKPOINTING_KEYS,
    DATA_TYPE_KEYS,
    EXPERT_KEYS,
    FP16_KEYS,
    OFFLOAD_KEYS,
    OTHER_KEY,
    PIPELINE_KEYS,
    REFUSED_KEYS,
    TENSOR_KEYS,
    TOP_KEYS,
    ZERO_KEYS,
)
from hocket.dist.config.deepspeed_values import is_on, one_of, positive, whole
from hocket.dist.config.dtypes import parse_dtype
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.key_table import ConfigKey, names_keys, resolve_keys
from hocket.dist.errors import ConfigError

_PRECISIONS = {torch.float16: "amp_fp16", torch.bfloat16: "amp_bf16"}
_ZERO = "deepspeed_config['zero_optimization']"
_MOST_SCALE_POWER = 127
"""The largest n for which 2**n is a finite float32."""


@names_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedSettings:
    """The settings that a DeepSpeed configuration asks for; None for a setting that it leaves out.

    Attributes:
        fsdp: The layout.
        precision: "amp_fp16" or "amp_bf16".
        train_batch_size: Samples of the global batch.
        device_train_microbatch_size: Samples that a rank runs at once.
        max_grad_norm: The joint norm to which gradients are clipped.
        loss_scale: Arguments of `torch.amp.GradScaler`.
        axes: The degrees of `tp`, `cp`, `pp` and `ep` that are above 1, as `parallelism_config` takes them.
            With `ep` it also has the axis that takes all ranks that are left.
    """

    fsdp: FSDPConfig
    precision: str | None = None
    train_batch_size: int | None = None
    device_train_microbatch_size: int | None = None
    max_grad_norm: float | None = None
    loss_scale: Mapping[str, Any] | None = None
    axes: Mapping[str, int] = field(default_factory=dict)


def translate_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int,
    precision: str | None = None,
    device_train_microbatch_size: int | str | None = None,
    train_batch_size: int | None = None,
    rank_batch_size: int | None = None,
    gradient_clipping: Any = None,
) -> DeepSpeedSettings:
    """Translate a DeepSpeed configuration, and compare it with the trainer's arguments of the same meaning.

    Args:
        config: A dict, or the path of a JSON file. The value "auto" counts as absent; it is refused for the
            ZeRO stage.
        world_size: Ranks of the job.
        precision: The trainer's argument, if set.
        device_train_microbatch_size: The trainer's argument, if set.
        train_batch_size: The global batch of the data loader, if known.
        rank_batch_size: The batch of a rank's data loader, if that is what is known.
        gradient_clipping: The trainer's argument, if set.

    Raises:
        ConfigError: A key is unknown or cannot be honoured, the batch sizes do not multiply, or a key
            contradicts an argument; both values are named.

    Example:
        >>> translate_deepspeed({"zero_optimization": {"stage": 2}}, world_size=4).fsdp.sharding_strategy
        'SHARD_GRAD_OP'
    """
    top = _block(_read(config), TOP_KEYS, "deepspeed_config")
    axes = _axes(top)
    num_data_ranks = _data_ranks(axes, world_size)
    if train_batch_size is None and rank_batch_size is not None:
        train_batch_size = rank_batch_size * num_data_ranks
    fsdp = _layout(top, num_data_ranks)
    settings = DeepSpeedSettings(
        fsdp=fsdp,
        axes=_around_experts(axes, fsdp, num_data_ranks),
        precision=_precision(top),
        max_grad_norm=positive(top, "gradient_clipping"),
        loss_scale=_loss_scale(top),
        **_batch_sizes(top, num_data_ranks, train_batch_size),
    )
    _compare("precision", precision, "fp16 or bf16", settings.precision)
    _compare(
        "device_train_microbatch_size",
        device_train_microbatch_size,
        "train_micro_batch_size_per_gpu",
        settings.device_train_microbatch_size,
    )
    _compare("gradient_clipping", gradient_clipping, "gradient_clipping", settings.max_grad_norm)
    return settings


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | os.PathLike):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`deepspeed_config` is {config!r}, which is not a readable JSON file: {error}"
            ) from error
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"`deepspeed_config` is a {type(config).__name__}, expected a dict or the path of a JSON file"
        )
    return config


def _block(config: Any, table: Mapping[str, ConfigKey], where: str) -> dict[str, Any]:
    """Return the mapped keys of a block; raise or log for all others.

    A key in no table that is near to one of the block is refused as a misspelling.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"`{where}` is {config!r}, expected a dict")
    present = {key: value for key, value in config.items() if value != "auto"}
    return resolve_keys(present, REFUSED_KEYS, table, where, other=OTHER_KEY)


def _inner(top: Mapping[str, Any], name: str, table: Mapping[str, ConfigKey]) -> dict[str, Any]:
    value = top.get(name)
    return {} if value is None else _block(value, table, f"deepspeed_config['{name}']")


def _zero(top: Mapping[str, Any]) -> dict[str, Any]:
    value = top.get("zero_optimization")
    if isinstance(value, Mapping) and value.get("stage") == "auto":
        # Not treated as absent, which is stage 0: it would copy the model to every rank without a warning.
        raise ConfigError(f"`{_ZERO}['stage']` is 'auto', expected 0, 1, 2 or 3")
    # The oldest form is a boolean that means stage 1.
    return {"stage": int(value)} if isinstance(value, bool) else _inner(top, "zero_optimization", ZERO_KEYS)


def _stage(zero: Mapping[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(
            f"`deepspeed_config['zero_optimization']['stage']` is {stage!r}, expected 0, 1, 2 or 3"
        )
    return int(stage)


def _layout(top: Mapping[str, Any], world_size: int) -> FSDPConfig:
    zero = _zero(top)
    stage = _stage(zero)
    keys: dict[str, Any] = {
        "sharding_strategy": ("NO_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "FULL_SHARD")[stage]
    }
    keys["gradient_sync"] = "last" if stage <= 1 else "every"
    if _is_offloaded(zero):
        keys["cpu_offload"] = True
    keys |= _partitions(zero, stage, world_size)
    keys["find_unused_parameters"] = is_on(zero, "ignore_unused_parameters", _ZERO)
    if top.get("activation_checkpointing") is not None:
        where = "deepspeed_config['activation_checkpointing']"
        checkpointing = _inner(top, "activation_checkpointing", CHECKPOINTING_KEYS)
        keys["activation_checkpointing"] = True
        keys["activation_cpu_offload"] = is_on(checkpointing, "cpu_checkpointing", where)
    types = _inner(top, "data_types", DATA_TYPE_KEYS)
    reduce = one_of(
        ("communication_data_type", top.get("communication_data_type")),
        ("data_types.grad_accum_dtype", types.get("grad_accum_dtype")),
    )
    amp_dtype = _precision_dtype(top)
    keys["amp_dtype"] = amp_dtype
    if reduce is not None:
        keys["mixed_precision"] = {
            "param_dtype": amp_dtype,
            "reduce_dtype": parse_dtype("communication_data_type", reduce),
        }
    return FSDPConfig(**keys)


def _axes(top: Mapping[str, Any]) -> dict[str, int]:
    """Return the degrees above 1 of the axes beside data parallelism."""
    where = "deepspeed_config['tensor_parallel']"
    tensor = _inner(top, "tensor_parallel", TENSOR_KEYS)
    sizes_only = {name: TENSOR_KEYS[name] for name in ("autotp_size", "tp_size")}
    inner = {} if tensor.get("tp") is None else _block(tensor["tp"], sizes_only, f"{where}['tp']")
    blocks = (("tensor_parallel", where, tensor), ("tp", f"{where}['tp']", inner))
    sizes = [
        (f"{label}.{name}", None if block.get(name) == 0 else whole(block, name, place))
        for label, place, block in blocks
        for name in sizes_only
    ]
    pipeline = {} if top.get("pipeline") is False else _inner(top, "pipeline", PIPELINE_KEYS)
    degrees = {
        TP: one_of(*sizes),
        CP: whole(top, "sequence_parallel_size"),
        PP: whole(pipeline, "stages", "deepspeed_config['pipeline']"),
        EP: _experts(top),
    }
    return {axis: degree for axis, degree in degrees.items() if degree not in (None, 1)}


def _experts(top: Mapping[str, Any]) -> int | None:
    """Return the ranks that share the experts, if experts are shared."""
    where = "deepspeed_config['expert_parallel']"
    block = _inner(top, "expert_parallel", EXPERT_KEYS)
    size = whole(block, "autoep_size", where)
    if "enabled" not in block and size not in (None, 1):
        raise ConfigError(
            f"`{where}['autoep_size']` is {size} without `enabled` in the block, so DeepSpeed ignores it. "
            "Set `enabled` to true, or leave the block out"
        )
    given = top.get("autoep_size")
    degree: int | None = one_of(
        ("expert_parallel.autoep_size", size if is_on(block, "enabled", where) else None),
        ("autoep_size", None if given is False or given == 0 else whole(top, "autoep_size")),
    )
    return degree


def _data_ranks(axes: Mapping[str, int], world_size: int) -> int:
    """Return the number of ranks with data of their own."""
    inner = {axis: degree for axis, degree in axes.items() if axis != EP}
    product = math.prod(inner.values())
    if world_size % product:
        told = " × ".join(f"`{axis}` {degree}" for axis, degree in inner.items())
        raise ConfigError(
            f"`deepspeed_config` asks for {told} ranks, which do not divide the {world_size} ranks of the "
            "job. Choose divisors (`autotp_size`, `sequence_parallel_size`, `stages` of `pipeline`)"
        )
    return world_size // product


def _around_experts(axes: Mapping[str, int], fsdp: FSDPConfig, num_data_ranks: int) -> dict[str, int]:
    """Return the axes with the one that takes all ranks that are left, as ZeRO does.

    Raises:
        ConfigError: The ranks that share parameters are no multiple of those that share experts.
    """
    if EP not in axes:
        return dict(axes)
    ranks, is_all = fsdp.data_parallel_shard_degree, fsdp.data_parallel_shard_degree == -1
    ranks = (num_data_ranks if is_all else ranks) * axes.get(CP, 1)
    if fsdp.sharding_strategy == "NO_SHARD" or ranks % axes[EP]:
        why = f"which does not divide the {ranks} ranks that share parameters. Choose a divisor"
        if fsdp.sharding_strategy == "NO_SHARD":
            why = "and ZeRO stage 0 shares nothing else between ranks. Set `stage` 1, 2 or 3"
        raise ConfigError(
            f"`deepspeed_config['autoep_size']` is {axes[EP]}, {why}, or leave `autoep_size` out"
        )
    return {**axes, DP_SHARD if is_all else DP_REPLICATE: -1}


def _partitions(zero: Mapping[str, Any], stage: int, world_size: int) -> dict[str, Any]:
    """Return the keys for groups of fewer than all ranks: ZeRO++'s hpZ and MiCS, both of stage 3."""
    keys: dict[str, Any] = {}
    ranks = world_size
    for name, off_values in (("mics_shard_size", (None, -1, 0)), ("zero_hpz_partition_size", (None, 0, 1))):
        if zero.get(name) in off_values:
            continue
        size = whole(zero, name, _ZERO)
        if stage != 3:
            raise ConfigError(
                f"`{_ZERO}['{name}']` is {size}, which needs ZeRO stage 3, but `stage` is {stage}. Set stage "
                "3, or leave the key out"
            )
        if size is None or ranks % size:
            raise ConfigError(
                f"`{_ZERO}['{name}']` is {size}, which does not divide {ranks} ranks. Choose a divisor"
            )
        if name == "mics_shard_size":
            ranks = size
            # MiCS sums over copies at the end of accumulation only.
            keys |= {"sharding_strategy": "HYBRID_SHARD", "gradient_sync": "replicas_last"}
            keys["data_parallel_shard_degree"] = size
        elif size < ranks:
            keys["reshard_after_forward"] = size
    return keys


def _is_offloaded(zero: Mapping[str, Any]) -> bool:
    is_offloaded = is_on(zero, "cpu_offload", _ZERO) or is_on(zero, "cpu_offload_params", _ZERO)
    for name in ("offload_optimizer", "offload_param"):
        where = f"{_ZERO}['{name}']"
        block = zero.get(name)
        device = None if block is None else _block(block, OFFLOAD_KEYS, where).get("device", "cpu")
        if device not in (None, "none", "cpu"):
            raise ConfigError(
                f"`{where}['device']` is {device!r}, expected 'cpu' or 'none'. Offload to the CPU"
            )
        is_offloaded |= device == "cpu"
    return is_offloaded


def _precision(top: Mapping[str, Any]) -> str | None:
    dtype = _precision_dtype(top)
    return None if dtype is None else _PRECISIONS[dtype]


def _precision_dtype(top: Mapping[str, Any]) -> torch.dtype | None:
    autocast = _inner(top, "torch_autocast", AUTOCAST_KEYS)
    dtypes = {
        "fp16": torch.float16 if _is_enabled(top, "fp16", FP16_KEYS) else None,
        "bf16": torch.bfloat16 if _is_enabled(top, "bf16", BF16_KEYS) else None,
        "bfloat16": torch.bfloat16 if _is_enabled(top, "bfloat16", BF16_KEYS) else None,
        "torch_autocast": parse_dtype("torch_autocast['dtype']", autocast.get("dtype", "bf16"))
        if _is_enabled(top, "torch_autocast", AUTOCAST_KEYS)
        else None,
    }
    value: torch.dtype | None = one_of(*dtypes.items())
    if value is not None and value not in _PRECISIONS:
        raise ConfigError(f"`torch_autocast['dtype']` is {value}, expected 'bfloat16' or 'float16'")
    return value


def _is_enabled(top: Mapping[str, Any], name: str, table: Mapping[str, ConfigKey]) -> bool:
    return is_on(_inner(top, name, table), "enabled", f"deepspeed_config['{name}']")


def _loss_scale(top: Mapping[str, Any]) -> dict[str, Any] | None:
    if not _is_enabled(top, "fp16", FP16_KEYS):
        return None
    fp16, where = _inner(top, "fp16", FP16_KEYS), "deepspeed_config['fp16']"
    if fixed := positive(fp16, "loss_scale", where):
        # A growth interval that no run reaches keeps the scale constant.
        return {"init_scale": fixed, "growth_interval": 2**31 - 1}
    power = fp16.get("initial_scale_power", 16)
    if isinstance(power, bool) or not isinstance(power, int) or not 0 <= power <= _MOST_SCALE_POWER:
        raise ConfigError(
            f"`{where}['initial_scale_power']` is {power!r}, expected a whole number from 0 to "
            f"{_MOST_SCALE_POWER}"
        )
    window = whole(fp16, "loss_scale_window", where)
    return {"init_scale": 2.0**power, "growth_interval": 1000 if window is None else window}


def _batch_sizes(top: Mapping[str, Any], world_size: int, given: int | None) -> dict[str, int | None]:
    """Return the global batch and the microbatch, deriving one of three numbers from the other two."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (whole(top, name) for name in names)
    _compare("the data loader's global batch", given, "train_batch_size", total)
    total = given if total is None else total
    if total is not None and micro is None:
        per_rank = (steps or 1) * world_size
        if total % per_rank:
            raise ConfigError(
                f"`train_batch_size` is {total}, which {world_size} ranks × {steps or 1} accumulation steps "
                "do not divide"
            )
        micro = total // per_rank if steps is not None else None
    elif micro is not None and total is None:
        total = micro * steps * world_size if steps is not None else None
    elif total is not None and micro is not None:
        derived = total // (micro * world_size)
        product = micro * (derived if steps is None else steps) * world_size
        if product != total or derived < 1:
            raise ConfigError(
                f"`train_batch_size` is {total}, but microbatch {micro} × accumulation steps "
                f"{derived if steps is None else steps} × {world_size} ranks is {product}. Correct one of "
                "them"
            )
    return {"train_batch_size": total, "device_train_microbatch_size": micro}


def _compare(argument: str, given: Any, key: str, configured: Any) -> None:
    if given is None or configured is None or given == "auto":
        return
    if getattr(given, "value", given) != configured:
        raise ConfigError(
            f"`{argument}` is {getattr(given, 'value', given)!r}, but `deepspeed_config` says {configured!r} "
            f"({key}). Set only one of them"
        )
