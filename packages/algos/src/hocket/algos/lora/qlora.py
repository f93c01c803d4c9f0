"""QLoRA: LoRA beside linear layers whose frozen weights are kept in 4 bits."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.algos.checks import check_choice
from hocket.algos.libraries import import_library
from hocket.algos.lora.linear4bit import Linear4Bit
from hocket.algos.lora.lora import LoRA, Names, apply_lora, linear_names
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryReport, drop_frozen, replace_module_classes
from hocket.algos.surgery.optimizers import Optimizers, named_parameters, repair_optimizers

if TYPE_CHECKING:
    from hocket.trainer.state import State


class QLoRA(LoRA):
    """Keeps the linear layers in 4 bits, frozen, and trains low-rank adapters beside them; from INIT on.

    Args:
        r: As for `LoRA`.
        lora_alpha: As there.
        lora_dropout: As there.
        target_modules: As there; every linear layer is quantized, also those without adapters.
        quant_type: `"nf4"`, for weights that are normally distributed, or `"fp4"`.
        double_quant: Whether the scales of the blocks are quantized, too.
        also_train: As there; what it names is not quantized.
        options: As there.

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
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: Names = None,
        *,
        quant_type: str = "nf4",
        double_quant: bool = True,
        also_train: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(r, lora_alpha, lora_dropout, target_modules, also_train=also_train, options=options)
        check_choice("quant_type", quant_type, ("nf4", "fp4"))
        self.quant_type = quant_type
        self.double_quant = double_quant

    def operate(self, state: "State") -> SurgeryReport:
        """Quantize the linear layers of `state.model`, and put adapters beside them."""
        return apply_qlora(
            state.model,
            self.r,
            self.lora_alpha,
            self.lora_dropout,
            self.target_modules,
            state.optimizers,
            quant_type=self.quant_type,
            double_quant=self.double_quant,
            also_train=self.also_train,
            options=self.options,
        )

    def conflict_with(self, other: Any) -> str | None:
        """Refuse methods that would replace the layers that are in 4 bits."""
        if type(other).__name__ in ("Float8", "QAT"):
            return "the linear layers are in 4 bits and have no weights left to round; use `LoRA` with it"
        return super().conflict_with(other)


def apply_qlora(
    model: nn.Module,
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: Names = None,
    optimizers: Optimizers | None = None,
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
    also_train: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> SurgeryReport:
    """Quantize a model's linear layers to 4 bits, with LoRA adapters beside them; needs no trainer.

    Args:
        model: Changed in place.
        r: As for `QLoRA`, with the other settings.
        lora_alpha: As there.
        lora_dropout: As there.
        target_modules: As there.
        optimizers: Get the adapters' parameters; lose those that are frozen.
        quant_type: As there.
        double_quant: As there.
        also_train: As there.
        options: As there.

    Returns:
        The report of the surgery; the modules in 4 bits are inside those that it names.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingLibraryError: `peft` or `bitsandbytes` is not installed or too old.
        SurgeryError: The model has no linear layer, or has adapters already.
    """
    check_choice("quant_type", quant_type, ("nf4", "fp4"))
    import_library("bitsandbytes", needed_by="QLoRA")
    import_library("peft", needed_by="QLoRA")
    chosen = {id(model.get_submodule(name)) for name in linear_names(model, also_train)}
    parameters = named_parameters(model)

    def quantize(module: nn.Linear, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        if id(module) not in chosen or type(module) is not nn.Linear:
            return None
        return Linear4Bit(module, quant_type=quant_type, double_quant=double_quant)

    quantized = replace_module_classes(model, {nn.Linear: quantize}, if_none="error", title="QLoRA")
    report = apply_lora(
        model, r, lora_alpha, lora_dropout, target_modules, also_train=also_train, options=options
    )
    report.optimizer_changes = repair_optimizers(optimizers, parameters, named_parameters(model))
    # Weights that are in 4 bits now are gone; the rest of what was trained is frozen.
    frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
    report.optimizer_changes += drop_frozen(optimizers, frozen)
    report.title, report.skipped = "QLoRA", quantized.skipped
    return report
