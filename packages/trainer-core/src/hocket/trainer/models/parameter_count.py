"""The number of a model's parameters."""

from __future__ import annotations

from torch import nn


def count_parameters(model: nn.Module) -> str:
    """Return the number of parameters in words, and of the tensors that the first batch gives a shape."""
    parameters = list(model.parameters())
    num_lazy = sum(map(nn.parameter.is_lazy, parameters))
    num = sum(parameter.numel() for parameter in parameters if not nn.parameter.is_lazy(parameter))
    text = f"{num:,} parameters"
    return f"{text}, {num_lazy} tensors without a shape yet" if num_lazy else text
