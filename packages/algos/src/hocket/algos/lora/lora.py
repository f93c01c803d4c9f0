"""LoRA: low-rank adapters of `peft` beside frozen linear layers."""

import re
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from torch import nn

from hocket.algos.checks import check_count, check_fraction, check_number
from hocket.algos.errors import AlgorithmConfigError, SurgeryError
from hocket.algos.libraries import import_library
from hocket.algos.lora.linear4bit import Linear4Bit
from hocket.algos.order import Order
from hocket.algos.surgery import SurgeryAlgorithm, SurgeryReport, drop_frozen, replace_by_library
from hocket.algos.surgery.checks import check_operable
from hocket.algos.surgery.fast_path import leave_fast_path
from hocket.algos.surgery.optimizers import Optimizers

if TYPE_CHECKING:
    from hocket.trainer.state import State

Names = str | Sequence[str] | None
_WRAPPED = ("model", "module")
"""The attributes under which wrappers of the trainer hold the user's model."""


class LoRAArguments(TypedDict, total=False):
    """The arguments that `QLoRA` shares with `LoRA`; `LoRA` documents their meaning and defaults."""

    lora_alpha: float
    lora_dropout: float
    target_modules: Names
    also_train: Sequence[str]
    options: Mapping[str, Any] | None


class LoRA(SurgeryAlgorithm):
    """Freezes the model and trains low-rank adapters beside its linear layers; from INIT on.

    Args:
        r: The rank of the adapters.
        lora_alpha: The adapters' output is scaled by `lora_alpha / r`.
        lora_dropout: Dropout before the adapters.
        target_modules: The layers that get adapters: a regular expression for the whole name, or last parts
            of names, as the user's model or the wrapper around it names them. None takes every `nn.Linear`
            and every `Conv1D` of transformers, except the output layer of a transformers model.
        also_train: Names of modules that are trained as well, such as a new head, as the user's model or the
            wrapper around it names them; `*` matches anything.
        options: Further arguments of `peft.LoraConfig`, such as `{"use_rslora": True}`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingLibraryError: At INIT, if `peft` is not installed or too old.

    Example:
        >>> LoRA(r=8, lora_alpha=16)
        LoRA(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=None, also_train=())

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    order = Order.LORA
    can_reapply: ClassVar[bool] = False  # `peft` takes only a model without adapters

    def __init__(
        self,
        r: int = 8,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: Names = None,
        *,
        also_train: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check(r, lora_alpha, lora_dropout, also_train)
        self.r = r
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.target_modules = target_modules
        self.also_train = tuple(also_train)
        self.options = dict(options or {})

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Linear layers, if no names are given."""
        return (nn.Linear,) if self.target_modules is None else ()

    def operate(self, state: "State") -> SurgeryReport:
        """Put adapters into `state.model`."""
        return apply_lora(state.model, self.r, optimizers=state.optimizers, **self._arguments)

    @property
    def _arguments(self) -> LoRAArguments:
        return {
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": self.target_modules,
            "also_train": self.also_train,
            "options": self.options,
        }

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second LoRA or QLoRA."""
        return (
            "each freezes the model and adds its own adapters; keep one" if isinstance(other, LoRA) else None
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(r={self.r}, lora_alpha={self.lora_alpha}, "
            f"lora_dropout={self.lora_dropout}, target_modules={self.target_modules!r}, "
            f"also_train={self.also_train!r})"
        )


def apply_lora(
    model: nn.Module,
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: Names = None,
    optimizers: Optimizers | None = None,
    *,
    also_train: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> SurgeryReport:
    """Freeze a model and put LoRA adapters beside its linear layers, in place; needs no trainer.

    The adapters' output is zero at first. `peft.get_peft_model_state_dict(model)` returns them alone, and
    `merge_lora` adds them to the weights after training.

    Args:
        model: Changed in place; a transformers model or any module.
        r: Same as for `LoRA`.
        lora_alpha: Same as for `LoRA`.
        lora_dropout: Same as for `LoRA`.
        target_modules: Same as for `LoRA`.
        optimizers: Receive the adapters' parameters, in the groups of the layers, and lose frozen ones.
        also_train: Same as for `LoRA`.
        options: Same as for `LoRA`.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: An argument is out of range, or a name in `also_train` matches no module.
        MissingLibraryError: `peft` is not installed or too old.
        SurgeryError: The model has adapters already, or no layer to put them beside.
    """
    _check(r, lora_alpha, lora_dropout, also_train)
    peft = import_library("peft", needed_by="LoRA")
    if hasattr(model, "peft_config") or any(_is_adapted(module) for module in model.modules()):
        raise SurgeryError("LoRA: the model has adapters of `peft` already. Merge them first (`merge_lora`)")
    trained_modules = [model.get_submodule(name) for name in names_matching(model, also_train)]
    targets = _targets(model, also_train) if target_modules is None else _own_names(model, target_modules)
    config = peft.LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        **(options or {}),
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def inject() -> None:
        try:
            with warnings.catch_warnings():
                # For a transposed layer, `peft` sets the option itself, and warns.
                warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
                peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise SurgeryError(
                f"LoRA: `peft` cannot put adapters into {type(model).__name__}: {error}"
            ) from error

    old_parameters = dict(model.named_parameters())
    report = replace_by_library(model, inject, optimizers, title="LoRA")
    leave_fast_path(model)
    for module in trained_modules:
        module.requires_grad_(True)
    frozen = {
        name: parameter
        for name, parameter in old_parameters.items()
        if name in trained and not parameter.requires_grad
    }
    report.optimizer_changes += drop_frozen(optimizers, frozen)
    return report


def merge_lora(model: nn.Module) -> int:
    """Add the adapters to the weights of their layers, in place, and remove the adapters.

    Layers in 4 bits become `nn.Linear` in the dtype that they had before. Call this after training, on a
    model that is not wrapped or sharded.

    Args:
        model: Changed in place.

    Returns:
        The number of layers that had adapters.

    Raises:
        SurgeryError: The model has no adapters, or is wrapped or sharded.
    """
    check_operable(model, "merge_lora")
    adapted = {name: one for name, one in model.named_modules() if _is_adapted(one)}
    if not adapted:
        raise SurgeryError(f"merge_lora: {type(model).__name__} has no adapters of `peft`")
    for name, layer in adapted.items():
        if isinstance(base := layer.base_layer, Linear4Bit):
            layer.base_layer = base.dequantized()
        layer.merge(safe_merge=True)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return len(adapted)


def linear_names(model: nn.Module, also_train: Sequence[str] = ()) -> list[str]:
    """Return the names of the linear layers that can have adapters.

    Modules in `also_train` and the output layer of a transformers model are left out.
    """
    outputs = {
        id(find())
        for module in model.modules()
        if callable(find := getattr(module, "get_output_embeddings", None))
    }
    left_out = _in_full(model, also_train)
    return [
        name
        for name, module in model.named_modules()
        if name
        and id(module) not in outputs
        and name not in left_out
        # Only these exact classes: linear layers whose weights other modules read are of a subclass.
        and (type(module) is nn.Linear or isinstance(module, Linear4Bit) or type(module).__name__ == "Conv1D")
    ]


def _targets(model: nn.Module, also_train: Sequence[str]) -> list[str]:
    names = linear_names(model, also_train)
    if not names:
        raise SurgeryError(
            f"LoRA: {type(model).__name__} has no linear layer to put adapters beside. Name other layers "
            "that `peft` can adapt in `target_modules`"
        )
    return names


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def names_matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that patterns match, with or without the prefix of a wrapper.

    Raises:
        AlgorithmConfigError: A pattern matches no module.
    """
    names: list[str] = []
    for pattern in patterns:
        matching = [name for name, _ in model.named_modules() if name and fnmatch(name, pattern)]
        matching = matching or [name for name, short in _short_names(model) if fnmatch(short, pattern)]
        if not matching:
            inner = next((model.get_submodule(one) for one in _WRAPPED if _is_child(model, one)), model)
            raise AlgorithmConfigError(
                f"`also_train` has `{pattern}`, which no module of {type(model).__name__} is named; it has "
                f"{', '.join(f'`{name}`' for name, _ in inner.named_children())}, ..."
            )
        names += matching
    return names


def _short_names(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names below a wrapper's model, with and without the wrapper's prefix."""
    return [
        (name, name.removeprefix(f"{wrapped}."))
        for wrapped in _WRAPPED
        if _is_child(model, wrapped)
        for name, _ in model.named_modules()
        if name.startswith(f"{wrapped}.")
    ]


def _is_child(model: nn.Module, name: str) -> bool:
    return name in dict(model.named_children())


def _in_full(model: nn.Module, also_train: Sequence[str]) -> set[str]:
    """Return the names of modules without adapters, because they train in full."""
    names = {name for name, _ in model.named_modules()}
    found = set(names_matching(model, also_train))
    by_wrapper = [name for name in found if not any(fnmatch(name, pattern) for pattern in also_train)]
    return found | {name for name in names for outer in by_wrapper if name.startswith(f"{outer}.")}


def _own_names(model: nn.Module, target_modules: str | Sequence[str]) -> str | Sequence[str]:
    """Return targets, with the names that a regular expression matches without the prefix of a wrapper."""
    if not isinstance(target_modules, str):
        return target_modules
    if any(re.fullmatch(target_modules, name) for name, _ in model.named_modules()):
        return target_modules
    return [
        name for name, short in _short_names(model) if re.fullmatch(target_modules, short)
    ] or target_modules


def _check(r: int, lora_alpha: float, lora_dropout: float, also_train: Sequence[str]) -> None:
    check_count("r", r)
    check_number("lora_alpha", lora_alpha, least=0)
    check_fraction("lora_dropout", lora_dropout)
    if isinstance(also_train, str):
        raise AlgorithmConfigError(f"`also_train` is {also_train!r}, expected a list: [{also_train!r}]")
