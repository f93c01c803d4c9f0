"""Activation checkpointing and activation offload of the modules of a model.

Both replace `forward` on the module's instance with one that calls torch's own implementation, so that names
of modules and parameters stay as they are.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.key_table import unknown_key
from hocket.dist.errors import ConfigError, WrapError

OPERATORS: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "convolution": ("convolution",),
}
"""Short names for sets of aten operators."""


def apply_activation_levers(model: nn.Module, config: FSDPConfig, blocks: Collection[str]) -> list[str]:
    """Checkpoint or offload the activations of the selected modules, in place.

    Args:
        model: Not sharded yet.
        config: Selects the levers.
        blocks: Names of the wrapped blocks, used if the model selects nothing itself.

    Returns:
        The names of the modules, in the order of the model.

    Raises:
        WrapError: A lever is on and no module is selected.
        ConfigError: An operator to keep is unknown.
    """
    if not (config.activation_checkpointing or config.activation_cpu_offload):
        return []
    context = _keep_operators(config.activation_checkpointing_save_ops)
    names = select_modules(model, config, blocks)
    if not names:
        raise WrapError(
            "`activation_checkpointing` or `activation_cpu_offload` is on, but the model has no repeated "
            "blocks and selects none. Set `_activation_checkpointing = True` on modules, or give the model "
            "`activation_checkpointing_fn(module)`"
        )
    for name in names:
        module = model.get_submodule(name)
        if config.activation_checkpointing:
            module.forward = functools.partial(
                checkpoint,
                module.forward,
                use_reentrant=False,
                **({"context_fn": context} if context else {}),
            )
        if config.activation_cpu_offload:
            module.forward = functools.partial(_offloaded, module, module.forward)
    return names


def select_modules(model: nn.Module, config: FSDPConfig, blocks: Collection[str]) -> list[str]:
    """Return the names of the modules on which the levers of a config act, in the order of the model.

    Args:
        model: Plain.
        config: Its levers may be off.
        blocks: Names of the wrapped blocks, used if the model selects nothing itself.
    """
    owners = (model, *model.children())
    choose = next((f for o in owners if callable(f := getattr(o, "activation_checkpointing_fn", None))), None)
    marks = {
        name: bool(module._activation_checkpointing)
        for name, module in model.named_modules()
        if hasattr(module, "_activation_checkpointing")
    }
    is_chosen_by_model = choose is not None or any(marks.values())
    selected: list[str] = []
    for name, module in model.named_modules():
        if name in marks:
            is_selected = marks[name]
        elif choose is not None:
            is_selected = bool(choose(module))
        else:
            is_selected = not is_chosen_by_model and name in blocks
        # A module inside a checkpointed one is recomputed with it.
        if is_selected and not any(name.startswith(f"{outer}.") for outer in selected):
            selected.append(name)
    return selected[:: config.activation_checkpointing_every]


def _keep_operators(names: Sequence[str]) -> Callable[[], Any] | None:
    """Return a `context_fn` that keeps the results of these operators, or None without operators."""
    if not names:
        return None
    kept_operators: set[Any] = set()
    for name in names:
        short_name = name.lower().removeprefix("aten.").removeprefix("aten::")
        overloads = [op for each in OPERATORS.get(short_name, (short_name,)) for op in _overloads(each)]
        if not overloads:
            raise ConfigError(
                unknown_key(name, {*OPERATORS, *dir(torch.ops.aten)}, "activation_checkpointing_save_ops")
            )
        kept_operators.update(overloads)

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept_operators else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank; tensor parallelism cuts weights and activations."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _offloaded(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` with the activations that it saves kept in host memory."""
    # Autograd saves weights too. They stay in place, since FSDP2 frees and gathers their storage itself.
    weights = {_local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
    device = next(module.parameters()).device
    hooks = save_on_cpu(pin_memory=device.type == "cuda")

    def pack(tensor: torch.Tensor) -> Any:
        local = _local(tensor)
        if local.untyped_storage().data_ptr() in weights:
            return tensor
        return hooks.pack_hook(local), tensor._spec if isinstance(tensor, DTensor) else None

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        local, spec = hooks.unpack_hook(packed[0]), packed[1]
        if spec is None:
            return local
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)
