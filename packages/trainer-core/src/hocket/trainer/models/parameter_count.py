"""A model in words: its class, and the number of its parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def describe_model(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """Return in words a model's class, how many parameters it has, and how many of them train."""
    name: str = model._get_name()  # type: ignore[no-untyped-call]  # by which torch shows a module
    return f"{name.removeprefix('FSDP')}, {count_parameters(model, optimizers)}"


def count_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """Return in words how many parameters a model has, how many train, and how many have no shape yet.

    A parameter trains if it requires a gradient and is in an optimizer.
    """
    parameters = list(model.parameters())
    shaped = [one for one in parameters if not nn.parameter.is_lazy(one)]
    optimized = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
    num, num_lazy = sum(one.numel() for one in shaped), len(parameters) - len(shaped)
    num_trained = sum(one.numel() for one in shaped if one.requires_grad and id(one) in optimized)
    text = (
        f"{num:,} parameters" if num_trained == num else f"{num:,} parameters, {num_trained:,} of which train"
    )
    return f"{text}, {num_lazy} tensors without a shape yet" if num_lazy else text
