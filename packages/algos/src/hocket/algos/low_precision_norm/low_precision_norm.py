"""Low-precision norms: layer norm and group norm that autocast does not raise to fp32."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from hocket.algos.errors import AlgorithmConfigError, NoEffectWarning
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, is_plain, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.surgery.replace import IfNone
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.state import State


class LPLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in autocast's precision where autocast is on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise the last dims."""
        x, weight, bias = _lowered(input, self.weight, self.bias)
        with torch.autocast(input.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LPGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that computes in autocast's precision where autocast is on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise groups of channels of `(B, C, ...)`."""
        x, weight, bias = _lowered(input, self.weight, self.bias)
        with torch.autocast(input.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(SurgeryAlgorithm):
    """Replaces layer norms by ones that compute in autocast's precision.

    Args:
        apply_at: `Event.INIT` or `"init"`; or, for a checkpoint of a model without these norms,
            `Event.AFTER_LOAD` or `"after_load"`.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: `apply_at` is another event.

    Example:
        >>> LowPrecisionLayerNorm()
        LowPrecisionLayerNorm(apply_at=Event.INIT)
    """

    order = Order.LOW_PRECISION_NORM
    replaced: ClassVar[type[nn.Module]] = nn.LayerNorm

    def __init__(self, apply_at: Event | str = Event.INIT, *, reapply: bool = False) -> None:
        super().__init__(reapply=reapply)
        event = next((one for one in (Event.INIT, Event.AFTER_LOAD) if one == apply_at), None)
        if event is None:
            raise AlgorithmConfigError(
                f"`apply_at` is {apply_at!r}, expected `Event.INIT` or `Event.AFTER_LOAD`"
            )
        self.operates_at = event

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """The norm that is replaced."""
        return (self.replaced,)

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the norms of `state.model`."""
        return apply_low_precision_layernorm(state.model, optimizers=state.optimizers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(apply_at=Event.{self.operates_at.name})"


class LowPrecisionGroupNorm(LowPrecisionLayerNorm):
    """Replaces group norms by ones that compute in autocast's precision.

    Args:
        apply_at: Same as for `LowPrecisionLayerNorm`.
        reapply: Same as for `LowPrecisionLayerNorm`.

    Raises:
        AlgorithmConfigError: `apply_at` is another event.
    """

    replaced = nn.GroupNorm

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the norms of `state.model`."""
        return apply_low_precision_groupnorm(state.model, optimizers=state.optimizers)


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: str | None = None,
    optimizers: Optimizers | None = None,
    *,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    """Replace a model's layer norms by ones in autocast's precision, in place; needs no trainer.

    Autocast computes norms in fp32 and casts their inputs and outputs. Without autocast nothing changes. The
    parameters stay the same objects.

    Args:
        model: Changed in place.
        precision: The precision to train in; with one that does not use autocast (`"fp32"`) the model is
            left as it is, with a `NoEffectWarning`. None always replaces the norms.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no layer norm: warn, raise, or neither.

    Returns:
        The report of the surgery.
    """

    def lower(module: nn.LayerNorm) -> nn.Module:
        return LPLayerNorm(list(module.normalized_shape), module.eps, elementwise_affine=False)

    arguments = (model, precision, optimizers, if_none)
    return _replace(nn.LayerNorm, lower, *arguments, title="LowPrecisionLayerNorm")


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: str | None = None,
    optimizers: Optimizers | None = None,
    *,
    if_none: IfNone = "warn",
) -> SurgeryReport:
    """Replace a model's group norms by ones in autocast's precision, in place; needs no trainer.

    Args:
        model: Changed in place.
        precision: The precision to train in; with one that does not use autocast (`"fp32"`) the model is
            left as it is, with a `NoEffectWarning`. None always replaces the norms.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no group norm: warn, raise, or neither.

    Returns:
        The report of the surgery.
    """

    def lower(module: nn.GroupNorm) -> nn.Module:
        return LPGroupNorm(module.num_groups, module.num_channels, module.eps, affine=False)

    arguments = (model, precision, optimizers, if_none)
    return _replace(nn.GroupNorm, lower, *arguments, title="LowPrecisionGroupNorm")


def _replace(
    kind: type[nn.Module],
    lower: Callable[[Any], nn.Module],
    model: nn.Module,
    precision: str | None,
    optimizers: Optimizers | None,
    if_none: IfNone,
    *,
    title: str,
) -> SurgeryReport:
    """Replace the plain norms of a kind, unless the precision makes that pointless."""
    name = None if precision is None else str(getattr(precision, "value", precision))
    if name not in (None, "amp_fp16", "amp_bf16"):
        warnings.warn(
            f"{title} changes nothing in the precision {name!r}; it does in 'amp_fp16' and 'amp_bf16'",
            NoEffectWarning,
            stacklevel=3,
        )
        return SurgeryReport(title)

    def policy(module: Any, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        return _with_parameters(lower(module), module) if is_plain(module, kind) else None

    return replace_module_classes(model, {kind: policy}, optimizers, if_none=if_none, title=title)


def _with_parameters(new: nn.Module, old: Any) -> nn.Module:
    for name in ("elementwise_affine", "affine"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    new.weight, new.bias = old.weight, old.bias
    return new


def _lowered(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    kind = x.device.type
    # Without autocast, a sharded layout may still gather the weights in another precision than the input's.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    lower = [None if part is None else part.to(dtype) for part in (weight, bias)]
    return x.to(dtype), lower[0], lower[1]
