"""The number of a model's parameters."""

from __future__ import annotations

from torch import nn


def count_parameters(model: nn.Module) -> str:
    """Return in words how many parameters a model has and trains, and how many tensors have no shape yet."""
    parameters = list(model.parameters())
    num_lazy = sum(map(nn.parameter.is_lazy, parameters))
    num = sum(parameter.numel() for parameter in parameters if not nn.parameter.is_lazy(parameter))
    num_trained = sum(
        one.numel() for one in parameters if one.requires_grad and not nn.parameter.is_lazy(one)
    )
    text = (
        f"{num:,} parameters" if num_trained == num else f"{num:,} parameters, {num_trained:,} of which train"
    )
    return f"{text}, {num_lazy} tensors without a shape yet" if num_lazy else text
