"""Checks of the preconditions of surgery."""

import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hocket.algos.errors import IncompatibleError, SurgeryError


def check_operable(model: nn.Module, title: str) -> None:
    """Refuse a model whose modules must not be replaced any more, or not yet.

    Raises:
        SurgeryError: The model is wrapped in DDP, sharded by FSDP, or has parameters without values.
    """
    for name, module in model.named_modules():
        place = f"`{name}`" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise SurgeryError(
                f"{title}: {place} is wrapped in DistributedDataParallel, which holds the old parameters. "
                "Apply the method before wrapping, or give it to the trainer, which applies it at INIT"
            )
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            how = "fully_shard" if isinstance(module, FSDPModule) else "FullyShardedDataParallel"
            raise SurgeryError(
                f"{title}: {place} is sharded by {how}, and new modules would not be. Apply the method "
                "before sharding, or give it to the trainer, which applies it at INIT"
            )
        if type(module.__dict__.get("forward")).__name__ == "Replica":
            raise SurgeryError(
                f"{title}: the forward of {place} goes through DistributedDataParallel, which holds the old "
                "parameters. Give the method to the trainer, which applies it at INIT"
            )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.is_meta:
            raise SurgeryError(
                f"{title}: tensor `{name}` has no values (it is on the meta device), so none can be taken "
                "over. Apply the method after the model has values (`to_empty` and initialisation)"
            )
        if isinstance(parameter, DTensor):
            raise SurgeryError(
                f"{title}: parameter `{name}` is sharded ({parameter.placements}). Apply the method before "
                "the model is laid out over ranks"
            )


def check_forward(old: inspect.Signature | None, new: nn.Module, where: str) -> None:
    """Refuse a replacement that cannot be called like the old module.

    Modules with a single input are called by position, so its name may differ; otherwise every argument of
    the old `forward` must also be one of the new `forward`.

    Raises:
        SurgeryError: An argument is missing, or the new `forward` requires one that the old does not have.
    """
    new_signature = signature_of(new)
    if old is None or new_signature is None:
        return
    old_parameters, new_parameters = list(old.parameters.values()), list(new_signature.parameters.values())
    takes_any = {parameter.kind for parameter in new_parameters}
    if (
        len(old_parameters) == 1
        and len([one for one in new_parameters if one.default is one.empty]) <= 1
        and new_parameters
    ):
        return
    names = {parameter.name for parameter in new_parameters}
    missing = [
        parameter.name
        for parameter in old_parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in names
        and inspect.Parameter.VAR_KEYWORD not in takes_any
    ]
    required = [
        parameter.name
        for parameter in new_parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in old.parameters
    ]
    if missing or required:
        raise SurgeryError(
            f"{where}: `{type(new).__name__}.forward{new_signature}` cannot be called as `forward{old}`: "
            f"it lacks {missing or 'nothing'} and requires {required or 'nothing more'}. Give the "
            "replacement's `forward` the same arguments"
        )


def signature_of(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of `forward`, or None if it cannot be determined."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def devices_of(module: nn.Module) -> set[torch.device]:
    """Return the devices of a module's parameters and buffers."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def device_of(module: nn.Module) -> torch.device | None:
    """Return the one device of a module's parameters and buffers, or None if there are none or several."""
    devices = devices_of(module)
    return next(iter(devices)) if len(devices) == 1 else None


def check_memory(num_bytes: int, device: torch.device, what: str) -> None:
    """Refuse an allocation that would not fit in the memory that a device has left.

    Raises:
        IncompatibleError: `num_bytes` is more than is available. Nothing is checked on devices that do not
            report it.
    """
    available = _available_bytes(device)
    if available is not None and num_bytes > available:
        raise IncompatibleError(
            f"{what} takes {num_bytes / 2**30:.1f} GiB, and {device} has {available / 2**30:.1f} GiB left. "
            "Choose a smaller size"
        )


def _available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = Path("/proc/meminfo")
    if device.type != "cpu" or not memory.exists():
        return None
    for line in memory.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def is_plain(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Return whether a module computes what one of `classes` does: its `forward` is not overridden."""
    return any(type(module).forward is one.forward for one in classes) and "forward" not in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that other code only calls, so that it may be replaced.

    Subclasses do not count, even with the same `forward`: `nn.MultiheadAttention` reads the weight of its
    `out_proj`, and a parametrized layer computes its weight.
    """
    return type(module) is nn.Linear and is_plain(module, nn.Linear)


def describe(classes: Sequence[type[nn.Module]]) -> str:
    """Name classes for a message."""
    return ", ".join(sorted(one.__name__ for one in classes)) or "no class"


def default_with_values(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Have new modules get values while the default device is `meta`, whose tensors have none.

    Args:
        device: The device of the modules beside them, on which they are made then; None for the CPU.
    """
    if torch.get_default_device().type != "meta" or (device is not None and device.type == "meta"):
        return contextlib.nullcontext()
    return torch.device("cpu") if device is None else device
