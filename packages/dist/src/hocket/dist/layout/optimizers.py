"""Replacement of an optimizer's parameters by their shards."""

import functools
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hocket.dist.errors import OptimizerError
from hocket.dist.layout.deferred_init import local_part

GroupNames = list[list[str]]

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Optimizers whose step changes each element of parameters and state in place, by that element's gradient."""


def name_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[GroupNames]:
    """Return, for each optimizer and each of its groups, the names of its parameters.

    Args:
        model: The model, before its parameters are replaced.
        optimizers: Built over its parameters.

    Raises:
        OptimizerError: An optimizer holds a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_names_in(optimizer, names) for optimizer in optimizers]


def release_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[GroupNames]:
    """Replace the optimizers' parameters by tensors without storage, and return the parameters' names.

    An optimizer that holds a whole parameter would keep it alive after the model replaces it by its shard.

    Args:
        model: The model, before its parameters are replaced.
        optimizers: Built over its parameters; `remap` gives them parameters again.

    Raises:
        OptimizerError: An optimizer holds a parameter that is not the model's. Nothing is changed.
    """
    names = name_parameters(model, optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _replace(
                optimizer, group["params"], [torch.empty_like(p, device="meta") for p in group["params"]]
            )
    return names


def remap(model: nn.Module, optimizers: Iterable[Optimizer], names: Iterable[GroupNames]) -> None:
    """Replace the parameters in the optimizers, in place, by the model's present ones of the same names.

    State is kept: a tensor with the shape of its parameter is sharded like the parameter, anything else (a
    step count) stays as it is.

    Args:
        model: The model, after its parameters were replaced.
        optimizers: The same ones as given to `release_parameters`.
        names: The result of `release_parameters`.
    """
    parameters = dict(model.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, group_names in zip(optimizer.param_groups, groups, strict=True):
            _replace(optimizer, group["params"], [parameters[name] for name in group_names])
        if type(optimizer) in _ELEMENTWISE:
            _step_local_parts(optimizer)
        elif not _steps_local_parts(optimizer):
            for group in optimizer.param_groups:
                _step_one_by_one(group)


def takes_both_kinds(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step sharded parameters beside whole ones.

    L-BFGS joins all of them to one vector, and one that is neither torch's nor Hocket's may do so, too.
    """
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "hocket."))
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


def _steps_local_parts(optimizer: Optimizer) -> bool:
    """Return whether the class that defines the optimizer's `step` says so; an override may not."""
    kinds: tuple[Any, ...] = type(optimizer).__mro__
    kind = next((one for one in kinds if "steps_local_parts" in vars(one)), None)
    if kind is None or not kind.steps_local_parts:
        return False
    return inspect.unwrap(kind.step) is inspect.unwrap(kinds[0].step)


def _step_local_parts(optimizer: Optimizer) -> None:
    """Let an optimizer compute with this rank's parts of sharded parameters, gradients and state.

    Its parameters and its state stay DTensors; torch's optimizers collect in lists what a step computes with,
    and each operation on a DTensor in them would find out its layout anew. The result is equal in every bit.
    """
    # A proxy, so that the optimizer does not hold itself and its state until the garbage is collected.
    collect = functools.partial(type(optimizer)._init_group, weakref.proxy(optimizer))  # type: ignore[attr-defined]

    def collect_local_parts(group: Any, *lists: list[Any]) -> Any:
        result = collect(group, *lists)
        parameters = list(lists[0])
        slots = [
            (one, index, tensor, parameter)
            for one in lists
            for index, (tensor, parameter) in enumerate(zip(one, parameters, strict=False))
        ]
        # A gradient or a state that the user has laid out in another way is left to torch, which refuses
        # what does not fit; a fused kernel would take a part of a whole state for this rank's part.
        if all(_is_laid_out_as(tensor, parameter) for _, _, tensor, parameter in slots):
            for one, index, tensor, _ in slots:
                if isinstance(tensor, DTensor):
                    one[index] = tensor.to_local()
        return result

    optimizer._init_group = collect_local_parts  # type: ignore[attr-defined]


def _is_laid_out_as(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a tensor is cut as a parameter is, or is one number."""
    if isinstance(tensor, DTensor):
        return isinstance(parameter, DTensor) and tensor.placements == parameter.placements
    return not isinstance(parameter, DTensor) or tensor.ndim == 0


def _step_one_by_one(group: dict[str, Any]) -> None:
    """Turn off the fused kernels of a group of which some parameters are sharded and some are whole.

    These kernels take only tensors of one kind.
    """
    if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused"):
            group["fused"] = False


def _replace(
    optimizer: Optimizer, parameters: list[torch.Tensor], new_parameters: list[torch.Tensor]
) -> None:
    """Exchange one group's parameters, and the keys of their state."""
    for old, new in zip(parameters, new_parameters, strict=True):
        if old in optimizer.state:
            optimizer.state[new] = _lay_out_state(optimizer.state.pop(old), new)
    # In place: L-BFGS keeps the list itself.
    parameters[:] = new_parameters


def _names_in(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    groups: GroupNames = []
    for index, group in enumerate(optimizer.param_groups):
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise OptimizerError(
                f"{type(optimizer).__name__}'s group {index} holds {len(unknown)} parameters that the "
                f"model does not have, the first of shape {tuple(unknown[0].shape)}. Build it from "
                "`model.parameters()` of the model given to the trainer"
            )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def _lay_out_state(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {slot: _lay_out(value, parameter) for slot, value in state.items()}


def _lay_out(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.ndim and value.shape == parameter.shape:
        # Each rank has the whole tensor, so nothing is sent. With host offload the shards are on the CPU.
        local = local_part(parameter, value).to(parameter.to_local().device).clone()
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value
