"""Weight standardization: convolution weights with mean 0 and variance 1 per output channel."""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from hocket.algos.checks import check_count
from hocket.algos.errors import SurgeryWarning
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone, Policy

if TYPE_CHECKING:
    from hocket.trainer.state import State

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EPSILON = 1e-10


class StandardizedWeight(nn.Module):
    """A parametrization that standardizes a weight over all dims but the first, the output channels."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` with mean 0 and variance 1 per output channel; the same shape."""
        dims = list(range(1, weight.ndim))
        variance, mean = torch.var_mean(weight, dim=dims, correction=0, keepdim=True)
        return (weight - mean) * torch.rsqrt(variance + _EPSILON)


class WeightStandardization(SurgeryAlgorithm):
    """Standardizes the weights of convolutions at INIT.

    Args:
        n_last_layers_ignore: The number of last convolutions to leave as they are, such as a network's head.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: `n_last_layers_ignore` is negative.

    Example:
        >>> WeightStandardization(n_last_layers_ignore=1)
        WeightStandardization(n_last_layers_ignore=1)
    """

    order = Order.WEIGHT_STANDARDIZATION

    def __init__(self, n_last_layers_ignore: int = 0, *, reapply: bool = False) -> None:
        super().__init__(reapply=reapply)
        check_count("n_last_layers_ignore", n_last_layers_ignore, least=0)
        self.n_last_layers_ignore = n_last_layers_ignore

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Convolutions."""
        return _CONVOLUTIONS

    def operate(self, state: "State") -> SurgeryReport:
        """Parametrize the convolutions of `state.model`."""
        return apply_weight_standardization(state.model, self.n_last_layers_ignore, state.optimizers)

    def __repr__(self) -> str:
        return f"WeightStandardization(n_last_layers_ignore={self.n_last_layers_ignore})"


def apply_weight_standardization(
    model: nn.Module,
    n_last_layers_ignore: int = 0,
    optimizers: Optimizers | None = None,
    *,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    """Standardize the weights of a model's convolutions, in place; needs no trainer.

    The weight stays the same parameter, under the name `parametrizations.weight.original`.

    Args:
        model: Changed in place.
        n_last_layers_ignore: The number of last convolutions to leave as they are: last in the order in which
            they run, if `torch.fx` can trace the model, else in the order of registration.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no convolution to change: warn, raise, or neither.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: `n_last_layers_ignore` is negative.

    Source: Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight Standardization,
        2019.
    """
    check_count("n_last_layers_ignore", n_last_layers_ignore, least=0)
    ignored = set(map(id, _last_convolutions(model, n_last_layers_ignore)))

    def standardize(module: nn.Module, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        is_done = parametrize.is_parametrized(module, "weight")
        if id(module) in ignored or is_done:
            return None
        parametrize.register_parametrization(module, "weight", StandardizedWeight())
        return module

    policies: dict[type[nn.Module], Policy] = dict.fromkeys(_CONVOLUTIONS, standardize)
    return replace_module_classes(model, policies, optimizers, if_none=if_none, title="WeightStandardization")


def _last_convolutions(model: nn.Module, count: int) -> list[nn.Module]:
    if count == 0:
        return []
    registered: list[nn.Module] = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # noqa: BLE001 - the model's own code runs in the trace and may raise anything
        warnings.warn(
            f"WeightStandardization: the order in which {type(model).__name__} runs its layers cannot be "
            f"traced ({type(error).__name__}), so the last {count} convolutions in the order of registration "
            "are left",
            SurgeryWarning,
            stacklevel=3,
        )
        return registered[len(registered) - count :] if count < len(registered) else registered
    called_modules = [
        model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"
    ]
    called_convolutions = list(
        dict.fromkeys(module for module in called_modules if isinstance(module, _CONVOLUTIONS))
    )
    # A convolution that does not run, or inside a module that is traced as a whole, counts as an early one.
    order = [module for module in registered if module not in called_convolutions] + called_convolutions
    return order[max(0, len(order) - count) :]
