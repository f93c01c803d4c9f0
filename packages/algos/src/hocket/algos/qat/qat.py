"""Quantization-aware training of linear layers, by `torchao`."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn

from hocket.algos.checks import check_choice, check_count
from hocket.algos.errors import SurgeryError
from hocket.algos.libraries import import_library
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, is_plain_linear, replace_module_classes
from hocket.algos.surgery.checks import check_operable
from hocket.algos.surgery.fast_path import leave_fast_path
from hocket.algos.surgery.optimizers import Optimizers
from hocket.algos.traits import Trait, has_trait

if TYPE_CHECKING:
    from hocket.trainer.state import State

Scheme = Literal["int8-int4", "int4", "int8"]


class QAT(SurgeryAlgorithm):
    """Trains linear layers with the rounding that they will have after quantization; from INIT on.

    Weights stay in the model's dtype and are rounded in each forward pass; the gradient passes through the
    rounding. After training `convert_qat` quantizes them.

    Args:
        scheme: `"int8-int4"` rounds inputs to int8 by token and weights to int4 by group; `"int4"` and
            `"int8"` round weights alone, by group. Or a configuration of `torchao.quantization` from which
            torchao can derive such rounding, such as `Float8DynamicActivationFloat8WeightConfig()`.
        group_size: Weights of a row that share a scale. Layers whose `in_features` it does not divide are
            left. Not used with a configuration.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: An argument has none of these values.
        MissingLibraryError: At INIT, if `torchao` is not installed or too old.

    Example:
        >>> QAT("int8-int4", group_size=32)
        QAT(scheme='int8-int4', group_size=32)

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
        Inference, 2017.
    """

    order = Order.QAT
    traits: ClassVar[frozenset[Trait]] = SurgeryAlgorithm.traits | {Trait.ROUNDS_LINEAR_LAYERS}

    def __init__(
        self, scheme: Scheme | Any = "int8-int4", group_size: int = 32, *, reapply: bool = False
    ) -> None:
        super().__init__(reapply=reapply)
        _check(scheme, group_size)
        self.scheme = scheme
        self.group_size = group_size

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Linear layers."""
        return (nn.Linear,)

    def operate(self, state: "State") -> SurgeryReport:
        """Make the linear layers of `state.model` round as after quantization."""
        return apply_qat(state.model, self.scheme, self.group_size, state.optimizers)

    def conflict_with(self, other: Any) -> str | None:
        """Refuse float8 training, which replaces the same layers."""
        if has_trait(other, Trait.ROUNDS_LINEAR_LAYERS):
            return "each replaces the linear layers by ones that round in its own way; keep one"
        return None

    def __repr__(self) -> str:
        return f"QAT(scheme={self.scheme!r}, group_size={self.group_size})"


def apply_qat(
    model: nn.Module,
    scheme: Scheme | Any = "int8-int4",
    group_size: int = 32,
    optimizers: Optimizers | None = None,
) -> SurgeryReport:
    """Make a model's linear layers round as they will after quantization, in place; needs no trainer.

    The parameters stay the same objects. The adapters of LoRA are left in full precision.

    Args:
        model: Changed in place.
        scheme: Same as for `QAT`.
        group_size: Same as for `QAT`.
        optimizers: Nothing in them has to change.

    Returns:
        The report of the surgery; layers that were left are in `skipped`.

    Raises:
        AlgorithmConfigError: An argument is none of those that `QAT` takes.
        MissingLibraryError: `torchao` is not installed or too old.
        SurgeryError: No layer can be treated.
    """
    _check(scheme, group_size)
    qat = import_library("torchao.quantization.qat", needed_by="QAT")
    quantize_ = import_library("torchao.quantization", needed_by="QAT").quantize_
    config = qat.QATConfig(_base(scheme, group_size), step="prepare")
    adapters = _adapters(model)

    def prepare(module: nn.Linear, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        is_divided = not isinstance(scheme, str) or module.in_features % group_size == 0
        if not is_plain_linear(module) or id(module) in adapters or not is_divided:
            return None
        holder = nn.Sequential(module)
        quantize_(holder, config)
        return holder[0]

    report = replace_module_classes(model, {nn.Linear: prepare}, optimizers, if_none="error", title="QAT")
    leave_fast_path(model)
    return report


def convert_qat(model: nn.Module, scheme: Scheme | Any = "int8-int4", group_size: int = 32) -> int:
    """Quantize the linear layers that `apply_qat` has prepared, in place; for inference, after training.

    Args:
        model: Changed in place; not wrapped or sharded.
        scheme: The scheme that the model was trained with.
        group_size: The group size that the model was trained with.

    Returns:
        The number of layers that are quantized now.

    Raises:
        MissingLibraryError: `torchao` is not installed or too old.
        SurgeryError: No layer was prepared.
    """
    _check(scheme, group_size)
    check_operable(model, "convert_qat")
    qat = import_library("torchao.quantization.qat", needed_by="convert_qat")
    quantize_ = import_library("torchao.quantization", needed_by="convert_qat").quantize_
    prepared = sum(isinstance(module, qat.FakeQuantizedLinear) for module in model.modules())
    if not prepared:
        raise SurgeryError(
            f"convert_qat: {type(model).__name__} has no layer that was prepared. Train it with `QAT`, or "
            "call `apply_qat` first"
        )
    quantize_(model, qat.QATConfig(_base(scheme, group_size), step="convert"))
    return prepared


def _base(scheme: Any, group_size: int) -> Any:
    """Return torchao's configuration of the quantized model."""
    if not isinstance(scheme, str):
        return scheme
    quantization = import_library("torchao.quantization", needed_by="QAT")
    granularity = quantization.PerGroup(group_size)
    if scheme == "int8-int4":
        return quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            weight_granularity=granularity,
        )
    dtype = torch.int4 if scheme == "int4" else torch.int8  # type: ignore[attr-defined]
    return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def _adapters(model: nn.Module) -> set[int]:
    """Return the ids of the modules of LoRA adapters."""
    return {
        id(inner)
        for module in model.modules()
        for name in ("lora_A", "lora_B")
        if isinstance(adapter := getattr(module, name, None), nn.Module)
        for inner in adapter.modules()
    }


def _check(scheme: Any, group_size: int) -> None:
    if isinstance(scheme, str):
        check_choice("scheme", scheme, get_args(Scheme))
    check_count("group_size", group_size)
