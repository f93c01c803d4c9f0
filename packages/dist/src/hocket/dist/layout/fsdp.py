"""Sharding a model in place with torch's `fully_shard`."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from hocket.dist.config.axes import DP_SHARD
from hocket.dist.config.dtypes import dtype_name, parse_dtype
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.activation import apply_activation_levers
from hocket.dist.layout.checks.model_checks import check_output_once, check_shardable
from hocket.dist.layout.wrapping import choose_wraps

_log = logging.getLogger("hocket.dist")

# Methods other than forward that run a model, and so have to gather its parameters.
_FORWARD_METHODS = ("eval_forward", "generate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The groups of a sharded model.

    Attributes:
        groups: Names of the groups, "" for the root, in the order in which they were made; none for a model
            that `fully_shard` was not applied to.
        checkpointed: Names of the modules whose activations are checkpointed or offloaded.
        ignored: Names of parameters that are whole on every rank.
    """

    groups: list[str]
    checkpointed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def shard(
    model: nn.Module,
    config: FSDPConfig,
    mesh: DeviceMesh,
    *,
    stacks: Mapping[str, DeviceMesh] | None = None,
    always: bool = False,
) -> Layout:
    """Shard `model` over `mesh`, in place, bottom-up.

    Parameters keep their names and become DTensors; the model's class gains `FSDPModule`, so that calling the
    model gathers its parameters. No communication.

    A model that is cut over another axis already, on a mesh of one rank, stays as it is if it is not cast
    either: there is nothing to gather or to reduce, and `fully_shard` would copy parameters and gradients
    all the same. The result then has no groups.

    Args:
        model: On any device, the meta device included; alike on all ranks. Parameters may be cut over
            another axis already.
        config: Determines grouping, casts, and levers.
        mesh: The data-parallel axes.
        stacks: Names of modules that are groups of their own on another mesh, as experts are.
        always: Whether to shard on a mesh of one rank, too, so that all parameters become DTensors.

    Raises:
        ModelError: The model has gradients that cannot be reduced into shards.
        ConfigError: A name in `ignored_modules` is not a module of the model.
        WrapError: The wrap policy does not fit the model.
    """
    ignored = _ignored_parameters(model, config)
    ignored.update(_whole_parameters(model, config, mesh))
    chosen = choose_wraps(model, ignored=ignored) if config.auto_wrap else {}
    if not chosen and config.auto_wrap and mesh.size() > 1 and mesh.get_rank() == 0:
        _log.warning(
            "%s has no repeated blocks, so it is one group and is gathered whole in each step. Mark modules "
            "with `_fsdp_wrap = True` to split it",
            type(model).__name__,
        )
    check_shardable(model, chosen, ignored)
    checkpointed = apply_activation_levers(model, config, chosen)
    if mesh.size() == 1 and not always and _is_kept(model, config, chosen.values()):
        return Layout(groups=[], checkpointed=checkpointed)
    stacks = stacks or {}
    for name, other in stacks.items():
        module = model.get_submodule(name)
        group_config = replace(config, **chosen.get(name, {}))
        _shard_group(
            module,
            group_config,
            other,
            ignored,
            reshard=bool(group_config.should_reshard),
            is_root=False,
            cuts_experts=True,
        )
    inside = tuple(f"{name}." for name in stacks)
    chosen = {name: options for name, options in chosen.items() if not f"{name}.".startswith(inside)}
    for name, options in chosen.items():
        module = model.get_submodule(name)
        group_config = replace(config, **options)
        _shard_group(module, group_config, mesh, ignored, reshard=group_config.should_reshard, is_root=False)
    # None: torch keeps the root's parameters after forward, since backward needs them first.
    _shard_group(model, config, mesh, ignored, reshard=None if config.should_reshard else False, is_root=True)
    _set_prefetch(model, config, [name for name, _ in model.named_modules() if name in chosen])
    _warn_of_no_effect(config, mesh=mesh)
    gather_in_methods(model)
    if mesh.size() > 1:
        check_output_once(model, [*chosen, ""])
    names = [name for name, parameter in model.named_parameters() if parameter in ignored]
    return Layout(groups=[*stacks, *chosen, ""], checkpointed=checkpointed, ignored=names)


def _is_kept(model: nn.Module, config: FSDPConfig, options: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether `fully_shard` on one rank would change nothing of a model that is cut over another axis.

    It would if it casts parameters, inputs or outputs, adds up gradients in another dtype than the
    parameters', or keeps the parameters in host memory.
    """
    parameters = list(model.parameters())
    if config.cpu_offload or not any(isinstance(one, DTensor) for one in parameters):
        return False
    policies = [replace(config, **group).policy_for(parameters) for group in ({}, *options)]
    dtypes = {one.dtype for one in parameters}
    return all(
        policy.param_dtype is None and policy.output_dtype is None and dtypes == {policy.reduce_dtype}
        for policy in policies
    )


def _warn_of_no_effect(config: FSDPConfig, *, mesh: DeviceMesh) -> None:
    if mesh.get_rank() == 0 and config.forward_prefetch_limit > 1 and not config.forward_prefetch:
        _log.warning(
            "`forward_prefetch_limit` is %d and has no effect without `forward_prefetch=True`",
            config.forward_prefetch_limit,
        )


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Copy the parameters and buffers of rank 0 to every rank. Collective, one tensor at a time."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            continue
        value = tensor.detach()
        device_value = value.to(device).contiguous()
        dist.broadcast(device_value, src=0)
        if device_value.data_ptr() != value.data_ptr() and dist.get_rank() != 0:
            value.copy_(device_value)


def describe_groups(model: nn.Module, config: FSDPConfig, layout: Layout) -> str:
    """Return a table with a line for each group: size, dtypes, re-sharding, prefetch and levers."""
    lines = [f"{'group':40} {'parameters':>14}  gathered   reduced    re-sharded  levers"]
    for name in reversed(layout.groups):
        module = model.get_submodule(name)
        inner = [
            other for other in layout.groups if other != name and other.startswith(f"{name}." if name else "")
        ]
        owned = [
            parameter
            for key, parameter in module.named_parameters(prefix=name)
            if not any(key.startswith(f"{other}.") for other in inner)
        ]
        policy = config.policy_for(owned, is_root=not name)
        gathered = dtype_name(policy.param_dtype) if policy.param_dtype else "as stored"
        reshard = config.should_reshard if name else "no (root)"
        levers = "activations " + "+".join(
            word
            for word, is_on in (
                ("checkpointed", config.activation_checkpointing),
                ("offloaded", config.activation_cpu_offload),
            )
            if is_on
        )
        lines.append(
            f"{name or '(root)':40} {sum(parameter.numel() for parameter in owned):14,}  {gathered:10} "
            f"{dtype_name(policy.reduce_dtype):10} {reshard!s:11} "
            f"{levers if name in layout.checkpointed else ''}"
        )
    lines.append(
        f"prefetch: forward {config.forward_prefetch_limit if config.forward_prefetch else 'implicit'}, "
        f"backward {config.backward_prefetch_limit}; host offload: {config.cpu_offload}; "
        f"ignored parameters: {len(layout.ignored)}"
    )
    return "\n".join(line.rstrip() for line in lines)


def layout_dtypes(config: FSDPConfig, model: nn.Module) -> str:
    """Describe the dtypes in which parameters are gathered and gradients reduced."""
    policy = config.policy_for(model.parameters())
    gathered = "as they are" if policy.param_dtype is None else dtype_name(policy.param_dtype)
    return f"parameters gathered {gathered}, gradients summed in {dtype_name(policy.reduce_dtype)}"


def _shard_group(
    module: nn.Module,
    config: FSDPConfig,
    mesh: DeviceMesh,
    ignored: set[nn.Parameter],
    *,
    reshard: bool | int | None,
    is_root: bool,
    cuts_experts: bool = False,
) -> None:
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    )
    policy = config.policy_for(module.parameters(), is_root=is_root)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        # Experts take the weights of their results in the router's precision.
        mp_policy=replace(policy, cast_forward_inputs=False) if cuts_experts else policy,
        offload_policy=offload,
        ignored_params=ignored or None,
        shard_placement_fn=partial(_cut_of_experts, ranks=mesh[DP_SHARD].size()) if cuts_experts else None,
    )


def _cut_of_experts(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    """Return the dim along which a stack of experts is cut into equal parts; None for dim 0, equal or not."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return next((Shard(dim) for dim, size in enumerate(local.shape) if size % ranks == 0), None)


def _ignored_parameters(model: nn.Module, config: FSDPConfig) -> set[nn.Parameter]:
    modules = dict(model.named_modules())
    parameters: set[nn.Parameter] = set()
    for entry in config.ignored_modules:
        module = modules.get(entry) if isinstance(entry, str) else entry
        if module is None or not any(module is known_module for known_module in modules.values()):
            shown = f"`{entry}`" if isinstance(entry, str) else f"a {type(entry).__name__}"
            raise ConfigError(
                f"`ignored_modules` has {shown}, which is not a module of {type(model).__name__}"
            )
        parameters.update(module.parameters())
    return parameters


def _whole_parameters(model: nn.Module, config: FSDPConfig, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot reduce the gradients of: scalars and complex ones."""
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.ndim or parameter.is_complex()
    }
    if named and config.amp_dtype is not None and parse_dtype("amp_dtype", config.amp_dtype) == torch.float16:
        raise ModelError(
            f"`{next(iter(named))}` is a scalar or complex, so it stays whole on every rank, and the low "
            "precision is fp16: torch's gradient scaler takes no gradients of which some are sharded and "
            "some are not. Use `precision='amp_bf16'`, or leave `fsdp_config` out"
        )
    if mesh.get_rank() == 0 and (large := [name for name, one in named.items() if one.ndim]):
        _log.warning(
            "%d complex parameters are whole on every rank, the first `%s`: `fully_shard` reduces the real "
            "parts of their gradients only",
            len(large),
            large[0],
        )
    return set(named.values())


def _set_prefetch(model: nn.Module, config: FSDPConfig, names: Collection[str]) -> None:
    """Give the blocks explicit prefetch lists, in the order in which the model defines them."""
    blocks: list[Any] = [model.get_submodule(name) for name in names]
    for index, block in enumerate(blocks):
        if config.forward_prefetch:
            block.set_modules_to_forward_prefetch(
                blocks[index + 1 : index + 1 + config.forward_prefetch_limit]
            )
        if config.backward_prefetch_limit > 1:
            previous_blocks = blocks[max(0, index - config.backward_prefetch_limit) : index]
            block.set_modules_to_backward_prefetch(previous_blocks[::-1])


def gather_in_methods(model: nn.Module) -> None:
    """Make `eval_forward` and `generate` gather parameters, and free them after a call without gradients.

    With gradients, backward frees the root's parameters. Without gradients, nothing else would free them, and
    the model would keep whole parameters in place of the shards that its optimizers and checkpoints hold.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def free() -> None:
        if not torch.is_grad_enabled():
            for group in groups:
                group.reshard()

    model.register_forward_hook(lambda *_: free(), always_call=True)
    for name in _FORWARD_METHODS:
        if not callable(getattr(model, name, None)):
            continue
        register_fsdp_forward_method(model, name)
        setattr(model, name, _then(getattr(model, name), free))


def _then(method: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            after()

    return run
