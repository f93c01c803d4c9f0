"""Refusals of models that a layout cannot train, by the name of the module or parameter at fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hocket.dist.dtypes import dtype_name
from hocket.dist.errors import ModelError


def check_model(model: nn.Module, *, has_config: bool) -> None:
    """Refuse a model without parameters, or one that is laid out over ranks already.

    Args:
        model: The model, before it is laid out.
        has_config: Whether it is to be sharded by a config.

    Raises:
        ModelError: The model is one of these.
    """
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to lay out.")
    advice = "Give the plain model" + (
        ", which `fsdp_config` shards."
        if has_config
        else "; `fsdp_config={}` shards it over the ranks, and without it each rank has a copy."
    )
    for name, module in model.named_modules():
        where = f"`{name}`, a {type(module).__name__}," if name else type(module).__name__
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            how = "fully_shard" if isinstance(module, FSDPModule) else "FullyShardedDataParallel"
            raise ModelError(f"{where} is sharded already, by `{how}`. {advice}")
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"{where} averages gradients itself, and the layout would average them a second time. Use "
                "its attribute `module` in its place."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ModelError(
                f"`{name}` is a DTensor, laid out as {tensor.placements} over a mesh with the axes "
                f"{tensor.device_mesh.mesh_dim_names}. Tensor parallelism, and other layouts of one's own, "
                f"are not trained yet. {advice}"
            )


def check_shardable(model: nn.Module, groups: Collection[str], whole: Collection[nn.Parameter]) -> None:
    """Refuse modules and groups whose gradients `fully_shard` cannot reduce.

    Args:
        model: The model, before it is sharded.
        groups: Names of the modules that become groups, apart from the root.
        whole: Parameters that are not sharded.

    Raises:
        ModelError: An embedding has sparse gradients, or a group has trainable parameters of several dtypes.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(
                f"`{name}` has sparse gradients, which cannot be reduced into shards. Build it with "
                "`sparse=False`, or leave `fsdp_config` out."
            )
    excluded = {id(parameter) for parameter in whole}
    first_of: dict[tuple[str, torch.dtype], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in excluded:
            first_of.setdefault((group_of(name, groups), parameter.dtype), name)
    _check_dtypes(first_of)


def _check_dtypes(first_of: Mapping[tuple[str, torch.dtype], str]) -> None:
    first: dict[str, tuple[torch.dtype, str]] = {}
    for (group, dtype), name in first_of.items():
        other_dtype, other = first.setdefault(group, (dtype, name))
        if other_dtype != dtype:
            raise ModelError(
                f"`{other}` is {dtype_name(other_dtype)} and `{name}` is {dtype_name(dtype)}, both in the "
                f"group `{group or '(root)'}`, which is gathered as one. Cast the model to one dtype (the "
                "trainer's `precision` sets that of the computation), or let modules of one dtype be "
                "groups of their own: set `_fsdp_wrap = True` on them and on the repeated blocks."
            )


def group_of(name: str, groups: Collection[str]) -> str:
    """Return the innermost of the named modules that a parameter is in; "" is the root."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        if parent in groups:
            return parent
    return ""
