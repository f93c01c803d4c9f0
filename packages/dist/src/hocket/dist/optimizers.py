"""Pointing optimizers at the parameters that sharding put in the place of the old ones."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from hocket.dist.errors import OptimizerError

GroupNames = list[list[str]]


def name_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[GroupNames]:
    """Return, for each optimizer and each of its groups, the names of its parameters.

    Args:
        model: Before its parameters are replaced.
        optimizers: Built over its parameters.

    Raises:
        OptimizerError: An optimizer holds a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_names_in(optimizer, names) for optimizer in optimizers]


def remap(model: nn.Module, optimizers: Iterable[Optimizer], names: Iterable[GroupNames]) -> None:
    """Put the model's present parameters into the optimizers, in place, where those of the same name were.

    State that is there already goes along: a tensor as large as its parameter is laid out as the parameter
    is, anything else (a step count) is kept.

    Args:
        model: After its parameters were replaced.
        optimizers: The same ones as given to `name_parameters`.
        names: What `name_parameters` returned.
    """
    parameters = dict(model.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, group_names in zip(optimizer.param_groups, groups, strict=True):
            old, new = group["params"], [parameters[name] for name in group_names]
            for before, after in zip(old, new, strict=True):
                if before is not after and before in optimizer.state:
                    optimizer.state[after] = _lay_out_state(optimizer.state.pop(before), after)
            group["params"] = new


def _names_in(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    groups: GroupNames = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = [parameter for parameter in group["params"] if id(parameter) not in names]
        if strangers:
            raise OptimizerError(
                f"{type(optimizer).__name__}'s group {index} holds {len(strangers)} parameters that the "
                f"model does not have, the first of shape {tuple(strangers[0].shape)}. Build it from "
                "`model.parameters()` of the model given to the trainer."
            )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def _lay_out_state(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {slot: _lay_out(value, parameter) for slot, value in state.items()}


def _lay_out(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.ndim and value.shape == parameter.shape:
        # Each rank has the whole of it already, so nothing is sent.
        mesh = parameter.device_mesh
        return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return value
