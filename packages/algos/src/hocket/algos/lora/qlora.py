"""QLoRA: LoRA beside linear layers whose frozen weights are kept in 4 bits."""

from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from hocket.algos.checks import check_choice
from hocket.algos.libraries import import_library
from hocket.algos.lora.linear4bit import Linear4Bit
from hocket.algos.lora.lora import LoRA, LoRAArguments, apply_lora, linear_names
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryReport, drop_frozen, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers, named_parameters, repair_optimizers
from hocket.algos.surgery.replace import Policy
from hocket.algos.traits import Trait, has_trait

if TYPE_CHECKING:
    from hocket.trainer.state import State

QUANT_TYPES = ("nf4", "fp4")


class QLoRA(LoRA):
    """Keeps the linear layers in 4 bits, frozen, and trains low-rank adapters beside them; from INIT on.

    Args:
        r: The rank of the adapters.
        quant_type: `"nf4"`, for weights that are normally distributed, or `"fp4"`.
        double_quant: Whether the scales of the blocks are quantized, too.
        **lora: Further arguments of `LoRA`. Every linear layer is quantized, also without adapters, except
            those that `also_train` names.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingLibraryError: At INIT, if `peft` or `bitsandbytes` is not installed or too old.

    Example:
        >>> QLoRA(r=8).quant_type
        'nf4'

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    order = Order.QLORA

    def __init__(
        self,
        r: int = 8,
        *,
        quant_type: str = "nf4",
        double_quant: bool = True,
        **lora: Unpack[LoRAArguments],
    ) -> None:
        super().__init__(r, **lora)
        check_choice("quant_type", quant_type, QUANT_TYPES)
        self.quant_type = quant_type
        self.double_quant = double_quant

    def operate(self, state: "State") -> SurgeryReport:
        """Quantize the linear layers of `state.model`, and put adapters beside them."""
        return apply_qlora(
            state.model,
            self.r,
            state.optimizers,
            quant_type=self.quant_type,
            double_quant=self.double_quant,
            **self._arguments,
        )

    def conflict_with(self, other: Any) -> str | None:
        """Refuse methods that would replace the layers in 4 bits."""
        if has_trait(other, Trait.ROUNDS_LINEAR_LAYERS):
            return "the linear layers are in 4 bits and have no weights left to round; use `LoRA` with it"
        return super().conflict_with(other)


def apply_qlora(
    model: nn.Module,
    r: int = 8,
    optimizers: Optimizers | None = None,
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
    **lora: Unpack[LoRAArguments],
) -> SurgeryReport:
    """Quantize a model's linear layers to 4 bits, with LoRA adapters beside them; needs no trainer.

    Args:
        model: Changed in place.
        r: Same as for `QLoRA`.
        optimizers: Receive the adapters' parameters, and lose frozen ones.
        quant_type: Same as for `QLoRA`.
        double_quant: Same as for `QLoRA`.
        **lora: Same as for `QLoRA`.

    Returns:
        The report of the surgery; the modules in 4 bits are inside the modules that the report names.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingLibraryError: `peft` or `bitsandbytes` is not installed or too old.
        SurgeryError: The model has no linear layer, or has adapters already.
    """
    check_choice("quant_type", quant_type, QUANT_TYPES)
    import_library("bitsandbytes", needed_by="QLoRA")
    import_library("peft", needed_by="QLoRA")
    chosen = {model.get_submodule(name) for name in linear_names(model, lora.get("also_train", ()))}
    parameters = named_parameters(model)

    def quantize(module: Any, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        if module not in chosen or isinstance(module, Linear4Bit):
            return None
        if not isinstance(module, nn.Linear):
            module = _from_conv1d(module)
        return Linear4Bit(module, quant_type=quant_type, double_quant=double_quant)

    kinds: list[type[nn.Module]] = [nn.Linear, *(type(module) for module in chosen)]
    policies: dict[type[nn.Module], Policy] = dict.fromkeys(kinds, quantize)
    quantized = replace_module_classes(model, policies, if_none="error", title="QLoRA")
    report = apply_lora(model, r, **lora)
    report.optimizer_changes = repair_optimizers(optimizers, parameters, named_parameters(model))
    # The repair removed the weights that are in 4 bits now; the other trained parameters are frozen.
    frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
    report.optimizer_changes += drop_frozen(optimizers, frozen)
    report.title, report.skipped = "QLoRA", quantized.skipped
    return report


def _from_conv1d(module: Any) -> nn.Linear:
    """Return transformers' `Conv1D`, whose weight is `(in, out)`, as a linear layer."""
    num_inputs, num_outputs = module.weight.shape
    linear = nn.Linear(num_inputs, num_outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear
