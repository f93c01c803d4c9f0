"""Refusals of models that a layout cannot train, by the name of the module or parameter at fault."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hocket.dist.config.dtypes import dtype_name
from hocket.dist.errors import ModelError


def check_output_once(model: nn.Module, groups: Sequence[str]) -> None:
    """Refuse, at its first forward pass with gradients, a group whose outputs hide their tensors.

    `fully_shard` finds the tensors of an output by torch's pytree, and hooks the backward pass to them. Of
    an output of another class it finds none, and gradients of the group would not be reduced, without a word.

    Args:
        model: Sharded.
        groups: The names of the sharded modules.
    """
    for name in groups:
        handles = list[RemovableHandle]()

        def check(
            module: nn.Module, _: object, output: object, name: str = name, handles: Any = handles
        ) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            handles[0].remove()
            if not isinstance(output, torch.Tensor) and not _leaves_with_gradient(tree_leaves(output)):
                kind = type(module).__name__.removeprefix("FSDP")
                _check_hidden(output, f"`{name}`, a {kind}," if name else kind)

        handles.append(model.get_submodule(name).register_forward_hook(check))


def _check_hidden(output: object, where: str) -> None:
    """Raise if an output has tensors that need gradients in attributes that torch's pytree does not see.

    Raises:
        ModelError: It has.
    """
    for part in tree_leaves(output):
        names = getattr(part, "__slots__", ())
        fields = getattr(part, "__dict__", {}) | {name: getattr(part, name, None) for name in names}
        if not isinstance(part, nn.Module) and _leaves_with_gradient(tree_leaves(fields)):
            raise ModelError(
                f"{where} returns a `{type(part).__name__}` with tensors that `fully_shard` does not find, "
                "so gradients would not be reduced. Return a tensor, a tuple, a list or a dict, or "
                "register the class: `torch.utils._pytree.register_pytree_node`, or `register_dataclass` "
                "for a dataclass"
            )


def _leaves_with_gradient(leaves: Iterable[object]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def check_model(model: nn.Module, *, has_config: bool) -> None:
    """Refuse a model without parameters, or one that is laid out over ranks already.

    Args:
        model: The model, before it is laid out.
        has_config: Whether it is to be sharded by a config.

    Raises:
        ModelError: The model is one of these.
    """
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to lay out")
    advice = "Give the plain model" + (
        ", which `fsdp_config` shards"
        if has_config
        else "; `fsdp_config={}` shards it over the ranks, and without it each rank has a copy"
    )
    for name, module in model.named_modules():
        where = f"`{name}`, a {type(module).__name__}," if name else type(module).__name__
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            how = "fully_shard" if isinstance(module, FSDPModule) else "FullyShardedDataParallel"
            raise ModelError(f"{where} is sharded already, by `{how}`. {advice}")
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"{where} averages gradients itself, and the layout would average them a second time. Use "
                "its attribute `module` in its place"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ModelError(
                f"`{name}` is a DTensor, laid out as {tensor.placements} over a mesh with the axes "
                f"{tensor.device_mesh.mesh_dim_names}. A trainer without a config takes such a model as it "
                f"is. {advice}"
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
                "`sparse=False`, or leave `fsdp_config` out"
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
                "groups of their own: set `_fsdp_wrap = True` on them and on the repeated blocks"
            )


def group_of(name: str, groups: Collection[str]) -> str:
    """Return the innermost of the named modules that a parameter is in; "" is the root."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        if parent in groups:
            return parent
    return ""
