"""Ways to initialise a model's weights by name, as `composer.models.Initializer`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hocket.compat.composer.utils.string_enum import StringEnum

_WEIGHTS: dict[str, Callable[[torch.Tensor], object]] = {
    "kaiming_normal": nn.init.kaiming_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
}


class Initializer(StringEnum):
    """Names of initialisations; `model.apply(Initializer("kaiming_normal").get_initializer())`."""

    KAIMING_NORMAL = "kaiming_normal"
    KAIMING_UNIFORM = "kaiming_uniform"
    BN_UNIFORM = "bn_uniform"
    BN_ONES = "bn_ones"
    XAVIER_UNIFORM = "xavier_uniform"
    XAVIER_NORMAL = "xavier_normal"
    LINEAR_LOG_CONSTANT_BIAS = "linear_log_constant_bias"

    def get_initializer(self) -> Callable[[nn.Module], None]:
        """Return a function that initialises one module, if the module is of a type it applies to."""
        return {"bn_ones": _bn_ones, "bn_uniform": _bn_uniform, "linear_log_constant_bias": _linear_bias}.get(
            self.value, self._initialise_weight
        )

    def _initialise_weight(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            _WEIGHTS[self.value](module.weight)


@torch.no_grad()
def _bn_ones(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.weight.fill_(1.0)
        module.bias.zero_()


@torch.no_grad()
def _bn_uniform(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.weight.uniform_()
        module.bias.zero_()


@torch.no_grad()
def _linear_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.fill_(-math.log(module.bias.shape[0]))
