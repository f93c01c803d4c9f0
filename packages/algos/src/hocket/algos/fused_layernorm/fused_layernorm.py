"""FusedLayerNorm: torch's own fused norms in place of norms written out in Python or taken from apex."""

from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone

if TYPE_CHECKING:
    from hocket.trainer.state import State

_LAYER_NORMS = frozenset({"FusedLayerNorm", "MixedFusedLayerNorm"})
_RMS_SUFFIX = "RMSNorm"
_RMS_NORMS = frozenset({"T5LayerNorm", "FusedRMSNorm", "MixedFusedRMSNorm"})


class FusedLayerNorm(SurgeryAlgorithm):
    """Replaces hand-written and apex's norms by torch's fused kernels, at INIT.

    torch's `nn.LayerNorm` and `nn.RMSNorm` are fused already and stay as they are.

    Args:
        reapply: Same as for every `SurgeryAlgorithm`.

    Example:
        >>> FusedLayerNorm()
        FusedLayerNorm()
    """

    order = Order.FUSED_LAYERNORM

    def __init__(self, *, reapply: bool = False) -> None:
        super().__init__(reapply=reapply)
        self._classes: tuple[type[nn.Module], ...] = ()

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The classes of norms that were found in the model."""
        return self._classes

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the norms of `state.model`."""
        self._classes = tuple(_classes(state.model))
        return apply_fused_layernorm(state.model, state.optimizers)

    def __repr__(self) -> str:
        return "FusedLayerNorm()"


def apply_fused_layernorm(
    model: nn.Module, optimizers: Optimizers | None = None, *, if_none: IfNone = "warn"
) -> SurgeryReport:
    """Replace a model's hand-written norms by `nn.LayerNorm` and `nn.RMSNorm`, in place; needs no trainer.

    These norms are recognised by their names and attributes: apex's `FusedLayerNorm` and `FusedRMSNorm`,
    transformers' `T5LayerNorm` and every `...RMSNorm` with `weight` and `variance_epsilon` or `eps`. The
    parameters stay the same objects.

    Args:
        model: Changed in place.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no such norm: warn, raise, or neither.

    Returns:
        The report of the surgery.
    """
    policies = dict.fromkeys(_classes(model), _fuse) or {_NoNorm: _fuse}
    return replace_module_classes(model, policies, optimizers, if_none=if_none, title="FusedLayerNorm")


class _NoNorm(nn.Module):
    """A class that no model has, so that the surgery reports that it found nothing."""


def _classes(model: nn.Module) -> list[type[nn.Module]]:
    return list(dict.fromkeys(type(module) for module in model.modules() if _is_hand_written(module)))


def _is_hand_written(module: nn.Module) -> bool:
    name = type(module).__name__
    is_torch = type(module).__module__.startswith("torch.")
    is_named = name in _LAYER_NORMS or name in _RMS_NORMS or name.endswith(_RMS_SUFFIX)
    return is_named and not is_torch and getattr(module, "weight", None) is not None


def _fuse(module: Any, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None:
        return None
    shape = tuple(module.weight.shape)
    new: Any
    if type(module).__name__ in _LAYER_NORMS:
        new = nn.LayerNorm(shape, eps, elementwise_affine=False)
        new.bias = module.bias
    else:
        new = nn.RMSNorm(shape, eps, elementwise_affine=False)
    new.weight, new.elementwise_affine = module.weight, True
    return new  # type: ignore[no-any-return]
