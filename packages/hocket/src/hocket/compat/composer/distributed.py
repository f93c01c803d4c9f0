"""Distribution of a model over ranks without a trainer, as `composer.distributed`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.devices import as_torch_device
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.compat.composer.utils.string_enum import StringEnum
from hocket.dist import FSDPConfig
from hocket.dist.provider import provide
from hocket.trainer import State
from hocket.trainer.process.devices import choose_device
from hocket.trainer.ranks.sharded_tensors import whole_tensor


class DDPSyncStrategy(StringEnum):
    """Names of the strategies that synchronise the gradients of microbatches."""

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"


@contextlib.contextmanager
def ddp_sync_context(
    state: State,
    is_final_microbatch: bool,
    sync_strategy: str | DDPSyncStrategy,
) -> Iterator[None]:
    """Run a backward pass that synchronises gradients, or leave this to the pass of the last microbatch.

    Args:
        state: The state, whose `parallelism` synchronises.
        is_final_microbatch: Whether the microbatch is the last of the batch.
        sync_strategy: `multi_auto_sync` synchronises in every pass.
    """
    is_synchronised = is_final_microbatch or sync_strategy == DDPSyncStrategy.MULTI_AUTO_SYNC
    model = state.module if state.module is not None else state.model
    state.parallelism.sync_gradients(model, is_synchronised)
    try:
        yield
    finally:
        state.parallelism.sync_gradients(model, True)


def prepare_ddp_module(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
    """Return a module whose gradients are averaged over ranks. Collective; needs a process group."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)


def prepare_fsdp_module(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    fsdp_config: FSDPConfig | Mapping[str, Any],
    precision: Any = None,
    device: Any = None,
    auto_microbatching: bool = False,  # noqa: ARG001 - Composer's signature
) -> tuple[list[Any], dict[Any, Any]]:
    """Shard a model in place over all ranks, and give optimizers the new parameters. Collective.

    Returns:
        An empty list and dict: there are no hooks and no further process groups to keep.
    """
    torch_device = choose_device(as_torch_device(device))
    name = None if precision is None else str(getattr(precision, "value", precision))
    layout = provide(fsdp_config, device=torch_device, precision=name)
    layout.lay_out(model, ensure_tuple(optimizers))
    return [], {}


def parallelize_composer_model(
    composer_model: nn.Module,
    optimizer: Optimizer | None,
    config: FSDPConfig | Mapping[str, Any],
    precision: Any = None,
) -> None:
    """Shard a model in place over all ranks, and give its optimizer the new parameters. Collective."""
    prepare_fsdp_module(composer_model, optimizer, config, precision)


def get_summon_params_fn(model: nn.Module) -> Callable[..., contextlib.AbstractContextManager[None]] | None:
    """Return a function `(module, writeback=True)` for whole parameters in a `with` block, or None.

    The result is None if no part of the model is sharded.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    return _summon


@contextlib.contextmanager
def _summon(module: nn.Module, writeback: bool = True, **_: Any) -> Iterator[None]:
    """Put whole parameters in place of sharded ones; with `writeback` their values are kept. Collective."""
    sharded: list[tuple[nn.Module, str, Any]] = []
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                sharded.append((owner, name, parameter))
    for owner, name, parameter in sharded:
        whole = nn.Parameter(whole_tensor(parameter).detach().clone(), parameter.requires_grad)
        owner._parameters[name] = whole
    try:
        yield
    finally:
        for owner, name, parameter in sharded:
            whole_now = owner._parameters[name]
            owner._parameters[name] = parameter
            if writeback and whole_now is not None:
                _write_back(parameter, whole_now.detach())


def _write_back(parameter: Any, whole: torch.Tensor) -> None:
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(sharded.to_local())


__all__ = [
    "DDPSyncStrategy",
    "ddp_sync_context",
    "get_summon_params_fn",
    "parallelize_composer_model",
    "prepare_ddp_module",
    "prepare_fsdp_module",
]

__getattr__ = absent_from("composer.distributed")
