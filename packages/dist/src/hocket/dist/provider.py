"""The entry point `parallelism` of the group `hocket.providers`, by which the trainer finds `hocket.dist`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.dtypes import parse_precision
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.parallelism import CONFIG_KEYS, ParallelismConfig, as_fsdp_config
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ConfigError
from hocket.dist.given_parallelism import GivenParallelism
from hocket.dist.layout.given import is_laid_out
from hocket.dist.layout.sequence.torch_ring import TorchRing
from hocket.dist.parallelism import FSDPParallelism
from hocket.dist.pipeline_parallelism import PipelineParallelism
from hocket.dist.ranks.mesh import mesh_shape
from hocket.dist.ranks.process_group import join
from hocket.dist.ranks.world import read_world
from hocket.dist.replicated_parallelism import ReplicatedParallelism

_Axes = tuple[FSDPConfig | None, ContextParallelConfig | None, TensorParallelConfig | None]


def provide(
    config: Mapping[str, Any] | FSDPConfig | ParallelismConfig | None = None,
    *,
    device: torch.device | str,
    timeout_s: float = 600.0,
    precision: str | None = None,
    find_unused_parameters: bool = False,
    gradient_sync: Literal["every", "last", "replicas_last"] | None = None,
    model: nn.Module | None = None,
) -> FSDPParallelism | ReplicatedParallelism | GivenParallelism | PipelineParallelism:
    """Join the other ranks and return the layout that `config` asks for.

    Collective: the first exchange between ranks, so a rank that is absent is named here. The config is
    validated before that.

    Args:
        config: None replicates the model; a config, or a dict of the keys of `FSDPConfig` or of
            `ParallelismConfig`, shards it with FSDP2.
        device: The device of training, "cpu" or "cuda".
        timeout_s: Seconds to wait for absent ranks, and for each collective afterwards.
        precision: The trainer's precision, such as "amp_bf16"; used if `amp_dtype` is not set.
        find_unused_parameters: Let backward passes leave parameters unused, as frozen layers do.
        gradient_sync: The microbatches that reduce gradients, as the key of that name of `FSDPConfig`, for a
            replicated model too (`replicas_last` is then `last`). None uses the key, or its default.
        model: A model that may have sharded parameters already; without a config it is then taken as it is.

    Returns:
        A layout whose `close()` leaves the process group if it was made here.

    Raises:
        ConfigError: The config has an unknown key or a value that cannot be honoured, or the precision does
            not fit it.
        WorldError: The launcher's environment is incomplete or contradicts itself.
        AbsentRanksError: Ranks did not appear in time.
    """
    pipeline = _pipeline_of(config)
    fsdp, context_parallel, tensor_parallel = _stages_of(config) if pipeline else _layout_of(config)
    if context_parallel is not None and context_parallel.is_ring:
        TorchRing()  # refuses a torch that has another one
    experts = _experts_of(config)
    low_precision = parse_precision(precision)
    if not timeout_s > 0:
        raise ConfigError(f"`timeout_s` is {timeout_s!r}, expected seconds above 0")
    if fsdp is not None:
        if fsdp.mixed_precision == "PURE" and fsdp.amp_dtype is None and precision is None:
            raise ConfigError(
                "`mixed_precision='PURE'` needs the low precision: set `amp_dtype='bf16'`, or the trainer's "
                "`precision`"
            )
        if (
            gradient_sync not in (None, fsdp.gradient_sync)
            and fsdp.gradient_sync is not None
            and not pipeline
        ):
            raise ConfigError(
                f"`gradient_sync` is {gradient_sync!r}, and {fsdp.gradient_sync!r} in `fsdp_config`. Set one "
                "of them"
            )
        fsdp = replace(
            fsdp.with_precision(low_precision),
            gradient_sync=fsdp.gradient_sync if pipeline else gradient_sync or fsdp.gradient_sync,
            find_unused_parameters=fsdp.find_unused_parameters or find_unused_parameters,
        )
        _check_together(fsdp, context_parallel, tensor_parallel, experts, precision)
        tensor = 1 if tensor_parallel is None else tensor_parallel.degree
        if pipeline is None:
            context = 1 if context_parallel is None else context_parallel.degree
            mesh_shape(fsdp, read_world(), context=context, tensor=tensor)
    if pipeline is not None:
        _check_pipeline(pipeline, precision)
    is_given = fsdp is None and pipeline is None and model is not None and is_laid_out(model)
    if is_given and gradient_sync not in (None, "every"):
        raise ConfigError(
            f"`gradient_sync` is {gradient_sync!r}, and the model is sharded already: each of its backward "
            "passes reduces gradients. Leave it out, or give the plain model and an `fsdp_config`"
        )
    group = join(
        device=torch.device(device), timeout_s=timeout_s, needs_group=fsdp is not None or pipeline is not None
    )
    try:
        if is_given and model is not None:
            return GivenParallelism(group, model)
        if pipeline is not None:
            return PipelineParallelism(
                pipeline,
                group,
                sharding=fsdp,
                tensor_parallel=tensor_parallel,
                context_parallel=context_parallel,
                experts=experts,
            )
        if fsdp is None:
            return ReplicatedParallelism(
                group,
                find_unused_parameters=find_unused_parameters,
                syncs_every_pass=gradient_sync == "every",
            )
        return FSDPParallelism(
            fsdp,
            group,
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
            experts=experts,
        )
    except BaseException:
        group.close()
        raise


def _check_together(
    fsdp: FSDPConfig,
    context_parallel: ContextParallelConfig | None,
    tensor_parallel: TensorParallelConfig | None,
    experts: int,
    precision: str | None,
) -> None:
    """Refuse settings of sharded models that do not go together.

    Raises:
        ConfigError: Two of them do not.
    """
    if precision == "amp_fp16" and fsdp.ignored_modules:
        raise ConfigError(
            f"`ignored_modules` is {fsdp.ignored_modules!r} and `precision` is 'amp_fp16': torch's "
            "gradient scaler takes no gradients of which some are sharded and some are not. Use "
            "`precision='amp_bf16'`, or shard all modules"
        )
    if precision == "amp_fp16" and tensor_parallel is not None:
        raise ConfigError(
            f"`tp` is {tensor_parallel.degree} and `precision` is 'amp_fp16': torch's gradient scaler "
            "takes no gradients of several layouts. Use `precision='amp_bf16'`"
        )
    if context_parallel is not None and context_parallel.is_ring and fsdp.activation_checkpointing_save_ops:
        raise ConfigError(
            f"`activation_checkpointing_save_ops` is {fsdp.activation_checkpointing_save_ops!r}, and the "
            "method of `cp` is 'ring', which torch's selective recomputation does not repeat operator by "
            "operator. Leave it out, which recomputes attention too"
        )
    if experts > 1 and (precision == "amp_fp16" or fsdp.cpu_offload):
        what = "`precision` is 'amp_fp16'" if precision == "amp_fp16" else "`cpu_offload` is True"
        raise ConfigError(
            f"`parallelism_config` has `ep`, and {what}, which does not work beside it. Leave one of "
            "the two out"
        )


def _check_pipeline(pipeline: PipelineConfig, precision: str | None) -> None:
    """Refuse a torch or a precision with which stages do not train.

    Raises:
        ConfigError: It is one.
    """
    if torch.__version__ < "2.10":
        raise ConfigError(
            f"`pp` is {pipeline.degree}, and this is torch {torch.__version__}, whose gloo ends ranks that "
            "send activations to each other. Install torch 2.10 or newer, or leave `pp` out"
        )
    if precision == "amp_fp16":
        raise ConfigError(
            f"`pp` is {pipeline.degree} and `precision` is 'amp_fp16': torch's gradient scaler knows the "
            "gradients of one stage alone. Use `precision='amp_bf16'`"
        )


def _pipeline_of(config: Any) -> PipelineConfig | None:
    """Return the pipeline that a config asks for; None for no axis `pp`."""
    if isinstance(config, Mapping) and {str(key).lower() for key in config} & CONFIG_KEYS:
        config = ParallelismConfig.from_mapping(config)
    is_asked = isinstance(config, ParallelismConfig) and config.pipeline.degree != 1
    return config.pipeline_of(read_world().world_size) if is_asked else None


def _experts_of(config: Any) -> int:
    """Return the number of ranks that share the experts; 1 for no axis `ep`."""
    if isinstance(config, Mapping) and {str(key).lower() for key in config} & CONFIG_KEYS:
        config = ParallelismConfig.from_mapping(config)
    is_asked = isinstance(config, ParallelismConfig) and config.shares_experts
    return config.expert_degree(read_world().world_size) if is_asked else 1


def _stages_of(config: Any) -> _Axes:
    """Return the same as `_layout_of` of each stage of a pipeline; no sharding for whole stages."""
    if not isinstance(config, ParallelismConfig):
        config = ParallelismConfig.from_mapping(config)
    world_size = read_world().world_size
    sharding: FSDPConfig | None = config.sharding_of_stages(world_size)
    return sharding, *_inner_axes(config, world_size)


def _layout_of(config: Any) -> _Axes:
    """Return the sharding, the context parallelism and the tensor parallelism; None for no such."""
    if isinstance(config, Mapping) and {str(key).lower() for key in config} & CONFIG_KEYS:
        config = ParallelismConfig.from_mapping(config)
    if not isinstance(config, ParallelismConfig):
        return as_fsdp_config(config), None, None
    if config.is_replicated:
        return None, None, None
    world_size = read_world().world_size
    return config.sharding(world_size), *_inner_axes(config, world_size)


def _inner_axes(
    config: ParallelismConfig, world_size: int
) -> tuple[ContextParallelConfig | None, TensorParallelConfig | None]:
    """Return the context parallelism and the tensor parallelism; None for one rank."""
    context, degree = config.inner_degrees(world_size)
    return (
        None if context == 1 or config.cp is None else replace(config.cp, degree=context),
        None if degree == 1 or config.tp is None else replace(config.tp, degree=degree),
    )
