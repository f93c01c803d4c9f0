"""FusedLayerNorm: torch's own fused norms in place of norms written out in Python or taken from apex."""

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.algos.errors import NoEffectWarning, SurgeryError, SurgeryWarning
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, replace_module_classes
from hocket.algos.surgery.checks import check_operable
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
        """The classes of the norms that were replaced."""
        return self._classes

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the norms of `state.model`."""
        report = apply_fused_layernorm(state.model, state.optimizers)
        self._classes = tuple(dict.fromkeys((*self._classes, *(type(one.old) for one in report))))
        return report

    def __repr__(self) -> str:
        return "FusedLayerNorm()"


def apply_fused_layernorm(
    model: nn.Module, optimizers: Optimizers | None = None, *, if_none: IfNone = "warn"
) -> SurgeryReport:
    """Replace a model's hand-written norms by `nn.LayerNorm` and `nn.RMSNorm`, in place; needs no trainer.

    These norms are recognised by their names and attributes: apex's `FusedLayerNorm` and `FusedRMSNorm`,
    transformers' `T5LayerNorm` and every `...RMSNorm` with `weight` and `variance_epsilon` or `eps`. The
    parameters stay the same objects. Each norm is compared with its replacement on a small random input: one
    that computes another function, such as Gemma's, which multiplies by `1 + weight`, stays, with a
    `SurgeryWarning`.

    Args:
        model: Changed in place.
        optimizers: Built over the model's parameters; nothing in them has to change.
        if_none: Action if there is no such norm: warn, raise, or neither.

    Returns:
        The report of the surgery.
    """
    check_operable(model, "FusedLayerNorm")
    fused, different, num_torch = dict[int, nn.Module](), dict[str, nn.Module](), 0
    classes = list[type[nn.Module]]()
    for name, module in model.named_modules():
        num_torch += isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if not _is_hand_written(module) or (new := _fused(module)) is None:
            continue
        if _computes_the_same(module, new):
            fused[id(module)] = new
            classes.append(type(module))
        else:
            different[name] = module
    if different and if_none == "warn":
        if_none = "ignore"  # one warning is enough

    def fuse(module: nn.Module, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        return fused.get(id(module))

    if not classes:
        _tell_no_effect(model, num_torch, if_none, has_different=bool(different))
        if_none = "ignore"
    policies = dict.fromkeys(classes, fuse) or {_NoNorm: fuse}
    report = replace_module_classes(model, policies, optimizers, if_none=if_none, title="FusedLayerNorm")
    report.skipped |= dict.fromkeys(different, "torch's norm computes another function")
    if different:
        kinds = ", ".join(sorted({f"`{type(module).__name__}`" for module in different.values()}))
        warnings.warn(
            f"FusedLayerNorm left {len(different)} norms of class {kinds} as they are: on a small random "
            "input torch's norm gave other outputs, or the class failed. Leave the method out if the model "
            "has no other norms",
            SurgeryWarning,
            stacklevel=2,
        )
    return report


class _NoNorm(nn.Module):
    """A class that no model has, since the surgery needs one."""


def _tell_no_effect(model: nn.Module, num_torch: int, if_none: IfNone, *, has_different: bool) -> None:
    """Warn or raise for a model without a norm to replace."""
    found = (
        f"its norms ({num_torch}) are torch's own, which are fused already"
        if num_torch and not has_different
        else "its hand-written norms compute another function than torch's"
        if has_different
        else "the model has no hand-written norm, and none of apex"
    )
    message = f"FusedLayerNorm replaced nothing in {type(model).__name__}: {found}. Leave the method out"
    if if_none == "error":
        raise SurgeryError(message)
    if if_none == "warn":
        warnings.warn(message, NoEffectWarning, stacklevel=3)


def _is_hand_written(module: nn.Module) -> bool:
    name = type(module).__name__
    is_torch = type(module).__module__.startswith("torch.")
    is_named = name in _LAYER_NORMS or name in _RMS_NORMS or name.endswith(_RMS_SUFFIX)
    return is_named and not is_torch and isinstance(getattr(module, "weight", None), nn.Parameter)


def _fused(module: Any) -> Any:
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
    return new


@torch.no_grad()
def _computes_the_same(old: Any, new: Any) -> bool:
    """Compare two norms on random inputs with random weights in fp32.

    The model's parameters and torch's random generators are not touched.
    """
    generator = torch.Generator().manual_seed(0)
    device, shape = old.weight.device, old.weight.shape
    names = [name for name in ("weight", "bias") if getattr(new, name, None) is not None]
    values = {name: (torch.rand(shape, generator=generator, device="cpu") + 0.5).to(device) for name in names}
    # Rows of several sizes, the smallest such that the place of eps in the formula shows.
    sizes = torch.tensor([1.0, 10.0, max(float(new.eps), 1e-12) ** 0.5], device="cpu")
    x = torch.randn((2, 3, *shape), generator=generator, device="cpu") * sizes.view(1, 3, *[1] * len(shape))
    try:
        # `forward` itself, without the hooks that the user may have registered.
        expected = _with_parameters(old, values).forward(x.to(device))
        actual = _with_parameters(new, values).forward(x.to(device))
        return torch.allclose(actual, expected, rtol=1e-3, atol=1e-4)
    except Exception:  # noqa: BLE001 - a class that cannot be run alone cannot be compared
        return False


def _with_parameters(module: nn.Module, values: dict[str, torch.Tensor]) -> Any:
    """Return a shallow copy of a module with other tensors in place of its parameters."""
    changed = copy.copy(module)
    changed.__dict__["_parameters"] = {**module._parameters, **values}
    return changed
