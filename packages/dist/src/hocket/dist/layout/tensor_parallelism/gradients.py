"""Gradients of parameters that are cut over `tp`, laid out as the parameters are."""

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def place_gradients(model: nn.Module) -> None:
    """Lay the gradients of DTensors out as their parameters are, in each backward pass.

    Of a whole parameter that acts on cut activations, each rank computes a part of a sum, and torch adds up
    the parts where a value is asked for. `fully_shard` does it at once; use this without it.

    Args:
        model: Its parameters are final. Frozen ones may be trained later.
    """
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) or not (
            parameter.is_floating_point() or parameter.is_complex()
        ):
            continue  # integers have no gradients
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes no hook for others, and keeps it for later
        parameter.register_hook(_Placing(parameter))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)


class _Placing:
    """A hook that redistributes a gradient; it holds the layout, and not the parameter."""

    __torch_unserializable__ = True  # else torch warns of the hook where a parameter is pickled

    def __init__(self, parameter: DTensor) -> None:
        self._placements = parameter.placements

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        local: Any = gradient._local_tensor
        if gradient.placements == self._placements and not isinstance(local, AsyncCollectiveTensor):
            return gradient
        placed = gradient.redistribute(placements=self._placements)
        local = placed.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return DTensor.from_local(
            local,
            placed.device_mesh,
            placed.placements,
            run_check=False,
            shape=placed.shape,
            stride=placed.stride(),
        )
