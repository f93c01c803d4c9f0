"""Averages of a model's weights beside the model, as `composer.algorithms.ema.EMAParameters`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import hocket.algos as _algos


class EMAParameters:
    """Copies of a model's trainable parameters and its buffers, which `compute_ema` averages.

    Args:
        model: The model to copy; None for no tensors.

    Attributes:
        named_parameters_dict: The averages of parameters, by name.
        named_buffers_dict: The averages of buffers, by name.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.named_parameters_dict: dict[str, torch.Tensor] = {}
        self.named_buffers_dict: dict[str, torch.Tensor] = {}
        if model is not None:
            self.named_parameters_dict |= {
                name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad
            }
            self.named_buffers_dict |= {name: one.detach().clone() for name, one in model.named_buffers()}

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> EMAParameters:
        """Return averages that share the given tensors, without copies."""
        made = cls(None)
        made.named_parameters_dict |= parameters
        made.named_buffers_dict |= buffers
        return made

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the averages of parameters with their names."""
        return self.named_parameters_dict.items()

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the averages of buffers with their names."""
        return self.named_buffers_dict.items()

    @torch.no_grad()
    def swap_params(self, model: nn.Module) -> None:
        """Exchange the averages with a model's tensors of the same names."""
        for tensor, average in self._pairs(model):
            previous = tensor.clone()
            tensor.copy_(average)
            average.copy_(previous)

    @torch.no_grad()
    def transfer_ema_params(self, model: nn.Module) -> None:
        """Write the averages into a model's tensors of the same names."""
        for tensor, average in self._pairs(model):
            tensor.copy_(average)

    def move_params_to_device(self, destination_model: nn.Module) -> None:
        """Move each average to the device of the model's tensor of the same name."""
        for averages, tensors in self._named(destination_model):
            averages |= {name: averages[name].to(one.device) for name, one in tensors if name in averages}

    def _named(
        self, model: nn.Module
    ) -> tuple[tuple[dict[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]], ...]:
        return (
            (self.named_parameters_dict, model.named_parameters()),
            (self.named_buffers_dict, model.named_buffers()),
        )

    def _pairs(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for averages, tensors in self._named(model):
            yield from ((one, averages[name]) for name, one in tensors if name in averages)


def compute_ema(model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99) -> None:
    """Update averages in place, as `hocket.algos.compute_ema`, in a copy of a model or in `EMAParameters`.

    Args:
        model: The model that is trained.
        ema_model: A copy of `model`, or `EMAParameters`; in the latter case only its names are averaged.
        smoothing: The share of the past average, 0 to 1.
    """
    source: Any = model
    if isinstance(ema_model, EMAParameters):
        source = EMAParameters.of(
            {name: one for name, one in model.named_parameters() if name in ema_model.named_parameters_dict},
            {name: one for name, one in model.named_buffers() if name in ema_model.named_buffers_dict},
        )
    average: Any = ema_model
    _algos.compute_ema(source, average, smoothing)


__all__ = ["EMAParameters", "compute_ema"]
