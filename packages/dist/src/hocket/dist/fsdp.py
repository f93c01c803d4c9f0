"""Sharding a model in place with torch's `fully_shard`."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from hocket.dist.config import FSDPConfig
from hocket.dist.errors import ModelError
from hocket.dist.wrapping import choose_wraps

_log = logging.getLogger("hocket.dist")

# Methods other than forward by which trainers and users run a model: they gather parameters too.
_FORWARD_METHODS = ("eval_forward", "generate")


def shard(model: nn.Module, config: FSDPConfig, mesh: DeviceMesh) -> list[str]:
    """Shard `model` over `mesh`, in place, bottom-up.

    Parameters keep their names and become DTensors; the model's class gains `FSDPModule`, so that calling the
    model gathers what it needs. Collective.

    Args:
        model: With values, on any device; alike on all ranks unless `sync_module_states`.
        config: Says what is grouped, cast and kept.
        mesh: From `build_mesh`.

    Returns:
        The names of the groups, "" for the root, in the order in which they were made.

    Raises:
        ModelError: The model has no parameters, none with values, or is sharded already.
        WrapError: The wrap policy does not fit the model.
    """
    check_model(model)
    chosen = choose_wraps(model) if config.auto_wrap else {}
    if not chosen and config.auto_wrap and mesh.size() > 1 and mesh.get_rank() == 0:
        _log.warning(
            "%s has no repeated blocks, so it is one group and gathered whole at each step. Mark modules "
            "with `_fsdp_wrap = True` to split it.",
            type(model).__name__,
        )
    if config.sync_module_states and mesh.size() > 1:
        broadcast_values(model, mesh)
    for name, options in chosen.items():
        module = model.get_submodule(name)
        own = replace(config, **options)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=own.should_reshard,
            mp_policy=own.policy_for(module.parameters(), is_root=False),
        )
    # None: torch keeps the root's parameters after forward, since backward needs them first.
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=None if config.should_reshard else False,
        mp_policy=config.policy_for(model.parameters()),
    )
    _gather_in_methods(model)
    return [*chosen, ""]


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be laid out.

    Raises:
        ModelError: No parameters, parameters on the meta device, or sharded already.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to lay out.")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} is sharded already. Give the plain model, or leave `fsdp_config` out."
        )
    empty = [name for name, parameter in parameters.items() if parameter.is_meta]
    if empty:
        raise ModelError(
            f"{len(empty)} parameters are on the meta device and have no values, the first `{empty[0]}`. "
            "Build the model on a real device."
        )


def broadcast_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the parameters and buffers of rank 0. Collective, one tensor at a time."""
    device = mesh.device_type
    for tensor in [*model.parameters(), *model.buffers()]:
        value = tensor.detach()
        there = value.to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != value.data_ptr() and mesh.get_rank() != 0:
            value.copy_(there)


def _gather_in_methods(model: nn.Module) -> None:
    """Let `eval_forward` and `generate` gather as forward does, and free after a forward without gradients.

    With gradients, backward frees what the root has kept. Without, nothing would: the model would go on
    holding whole parameters, which are not those that its optimizers and checkpoints know.
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


def layout_dtypes(config: FSDPConfig, model: nn.Module) -> str:
    """Say in words in which dtypes parameters are gathered and gradients summed."""
    policy = config.policy_for(model.parameters())
    gathered = "as they are" if policy.param_dtype is None else _short(policy.param_dtype)
    return f"parameters gathered {gathered}, gradients summed in {_short(policy.reduce_dtype)}"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
