"""Gated linear units: feed-forward layers whose hidden units are multiplied by a second projection."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone

if TYPE_CHECKING:
    from hocket.trainer.state import State

Activation = Callable[[torch.Tensor], torch.Tensor]
# transformers' first halves of feed-forward layers: a `dense` projection and `intermediate_act_fn`.
_INTERMEDIATES = frozenset({"BertIntermediate", "RobertaIntermediate", "ElectraIntermediate"})


class GatedIntermediate(nn.Module):
    """The first half of a gated feed-forward layer: `act(x W) * (x V)`.

    Args:
        dense: The projection `W`, used as it is; without its bias unless `gated_layer_bias`.
        act: The activation of the gate.
        gated_layer_bias: Whether `W` keeps its bias.
        non_gated_layer_bias: Whether `V` has a bias.
    """

    def __init__(
        self,
        dense: nn.Linear,
        act: Activation,
        *,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
    ) -> None:
        super().__init__()
        self.dense = dense
        self.intermediate_act_fn = act
        if not gated_layer_bias:
            dense.bias = None  # type: ignore[assignment]  # torch allows it
        self.gate = nn.Linear(
            dense.in_features,
            dense.out_features,
            bias=non_gated_layer_bias,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        nn.init.normal_(self.gate.weight, std=float(dense.weight.detach().std()))
        if non_gated_layer_bias:
            nn.init.zeros_(self.gate.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project `(B, L, D)` to `(B, L, F)`."""
        gated: torch.Tensor = self.intermediate_act_fn(self.dense(hidden_states)) * self.gate(hidden_states)
        return gated


class GatedLinearUnits(SurgeryAlgorithm):
    """Gives BERT's feed-forward layers a gate, at INIT.

    Args:
        act_fn: The activation of the gate; that of the layer if None.
        gated_layer_bias: Whether the gated projection keeps its bias.
        non_gated_layer_bias: Whether the projection that it is multiplied by has a bias.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: `act_fn` cannot be called.

    Example:
        >>> GatedLinearUnits()
        GatedLinearUnits(act_fn=None, gated_layer_bias=False, non_gated_layer_bias=False)
    """

    def __init__(
        self,
        act_fn: Activation | None = None,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        *,
        reapply: bool = False,
    ) -> None:
        super().__init__(reapply=reapply)
        _check(act_fn)
        self.act_fn = act_fn
        self.gated_layer_bias = gated_layer_bias
        self.non_gated_layer_bias = non_gated_layer_bias
        self._classes: tuple[type[nn.Module], ...] = ()

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The feed-forward classes that were found in the model."""
        return self._classes

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the feed-forward layers of `state.model`."""
        self._classes = tuple(_classes(state.model))
        return apply_gated_linear_units(
            state.model, state.optimizers, self.act_fn, self.gated_layer_bias, self.non_gated_layer_bias
        )

    def __repr__(self) -> str:
        return (
            f"GatedLinearUnits(act_fn={self.act_fn!r}, gated_layer_bias={self.gated_layer_bias}, "
            f"non_gated_layer_bias={self.non_gated_layer_bias})"
        )


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizers | None = None,
    act_fn: Activation | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    if_none: IfNone = "error",
) -> SurgeryReport:
    """Give a model's feed-forward layers a gate, in place; needs no trainer.

    Treats the `BertIntermediate` of transformers, and RoBERTa's and ELECTRA's.

    Args:
        model: Changed in place.
        optimizers: Receive the new parameters, in the group of the layer's weight.
        act_fn: Same as for `GatedLinearUnits`.
        gated_layer_bias: Same as for `GatedLinearUnits`.
        non_gated_layer_bias: Same as for `GatedLinearUnits`.
        if_none: Action if there is no such layer: raise, warn, or neither.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: `act_fn` cannot be called.
        IncompatibleError: A layer of such a name has no `dense` projection.
        SurgeryError: The model has no such layer.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, equation 5.
    """
    _check(act_fn)

    def gate(module: Any, index: int) -> nn.Module:  # noqa: ARG001 - the policy's form
        if not isinstance(getattr(module, "dense", None), nn.Linear):
            raise IncompatibleError(
                f"`GatedLinearUnits` needs a `torch.nn.Linear` named `dense` in {type(module).__name__}, and "
                "there is none. Register a layer of that form under one of the class names it treats: "
                f"{', '.join(sorted(_INTERMEDIATES))}"
            )
        return GatedIntermediate(
            module.dense,
            act_fn or module.intermediate_act_fn,
            gated_layer_bias=gated_layer_bias,
            non_gated_layer_bias=non_gated_layer_bias,
        )

    policies = dict.fromkeys(_classes(model), gate) or {GatedIntermediate: gate}
    return replace_module_classes(model, policies, optimizers, if_none=if_none, title="GatedLinearUnits")


def _classes(model: nn.Module) -> list[type[nn.Module]]:
    classes = (type(module) for module in model.modules() if type(module).__name__ in _INTERMEDIATES)
    return list(dict.fromkeys(classes))


def _check(act_fn: Activation | None) -> None:
    if act_fn is not None and not callable(act_fn):
        raise AlgorithmConfigError(
            f"`act_fn` is {act_fn!r}, expected a function of a tensor such as `torch.nn.functional.gelu`"
        )
