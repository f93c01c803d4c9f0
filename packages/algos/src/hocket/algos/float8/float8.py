"""Float8 training of linear layers, by `torchao`."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn

from hocket.algos.checks import check_choice
from hocket.algos.errors import IncompatibleError
from hocket.algos.libraries import import_library
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, is_plain_linear, replace_module_classes
from hocket.algos.surgery.fast_path import leave_fast_path
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.traits import Trait, has_trait

if TYPE_CHECKING:
    from hocket.trainer.state import State

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
# The first NVIDIA GPUs with float8 matrix products: Ada (8.9) and Hopper (9.0).
OLDEST_CAPABILITY = (8, 9)
# The kernels take sizes that 16 divides.
_DIVISOR = 16


class Float8(SurgeryAlgorithm):
    """Computes the matrix products of linear layers in float8, in both passes; from INIT on.

    Weights, gradients and the optimizer stay in the model's dtype.

    Args:
        recipe: A recipe of torchao: `"tensorwise"` (one scale per tensor, fastest), `"rowwise"` (one per row,
            more exact), `"rowwise_with_gw_hp"` (rowwise, the weights' gradient in the model's dtype).
        emulate: Compute the same rounding in the model's dtype, on any hardware; slow, for tests.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: The recipe is unknown.
        IncompatibleError: At INIT, if the device has no float8 matrix products and `emulate` is not set.
        MissingLibraryError: At INIT, if `torchao` is not installed or too old.

    Example:
        >>> Float8("rowwise")
        Float8(recipe='rowwise', emulate=False)

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    order = Order.FLOAT8
    traits: ClassVar[frozenset[Trait]] = SurgeryAlgorithm.traits | {Trait.ROUNDS_LINEAR_LAYERS}

    def __init__(
        self, recipe: Recipe = "tensorwise", *, emulate: bool = False, reapply: bool = False
    ) -> None:
        super().__init__(reapply=reapply)
        check_choice("recipe", recipe, get_args(Recipe))
        self.recipe: Recipe = recipe
        self.emulate = emulate

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Linear layers."""
        return (nn.Linear,)

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the linear layers of `state.model`."""
        _check_device(state.device, self.recipe, self.emulate)
        return apply_float8(state.model, self.recipe, state.optimizers, emulate=self.emulate)

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second method that replaces the linear layers by ones that round."""
        if has_trait(other, Trait.ROUNDS_LINEAR_LAYERS):
            return "each replaces the linear layers by ones that round in its own way; keep one"
        return None

    def __repr__(self) -> str:
        return f"Float8(recipe={self.recipe!r}, emulate={self.emulate})"


def apply_float8(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    optimizers: Optimizers | None = None,
    *,
    emulate: bool = False,
) -> SurgeryReport:
    """Compute the matrix products of a model's linear layers in float8, in place; needs no trainer.

    The parameters stay the same objects. Layers with a size that 16 does not divide are left.

    Args:
        model: Changed in place.
        recipe: Same as for `Float8`.
        optimizers: Nothing in them has to change.
        emulate: Same as for `Float8`.

    Returns:
        The report of the surgery; layers that were left are in `skipped`.

    Raises:
        AlgorithmConfigError: The recipe is unknown.
        IncompatibleError: The model is on a device without float8 matrix products, and `emulate` is not set.
        MissingLibraryError: `torchao` is not installed or too old.
        SurgeryError: No layer can be treated.
    """
    check_choice("recipe", recipe, get_args(Recipe))
    for device in {parameter.device for parameter in model.parameters()}:
        _check_device(device, recipe, emulate)
    float8 = import_library("torchao.float8", needed_by="Float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(config, "emulate", True)

    def convert(module: nn.Linear, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        if module.in_features % _DIVISOR or module.out_features % _DIVISOR or not is_plain_linear(module):
            return None
        new: nn.Module = float8.convert_to_float8_training(module, config=config)
        return new

    report = replace_module_classes(model, {nn.Linear: convert}, optimizers, if_none="error", title="Float8")
    leave_fast_path(model)
    return report


def _check_device(device: torch.device, recipe: str, emulate: bool) -> None:
    if emulate:
        return
    reason = f"the model is on `{device}`"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= OLDEST_CAPABILITY:
            return
        reason = f"`{device}` is a {torch.cuda.get_device_name(device)} of compute capability {capability}"
    raise IncompatibleError(
        f"`Float8({recipe!r})` needs a GPU with float8 matrix products (compute capability 8.9 or newer, as "
        f"Ada, Hopper and Blackwell have), but {reason}. Leave it out, or pass `emulate=True` to compute the "
        "same rounding slowly, for tests"
    )
