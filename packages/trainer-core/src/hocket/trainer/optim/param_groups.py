"""Parameter groups by name pattern."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.optim.parameter_names import plain_name


class OwnedParameter(NamedTuple):
    """A parameter with its place in the model."""

    name: str
    """The name in `model.named_parameters()`, without the prefixes of compiling and checkpointing."""
    parameter: nn.Parameter
    module: nn.Module
    """The module that owns it."""


Selector: TypeAlias = "str | Callable[[OwnedParameter], bool]"
"""A glob over a parameter's whole name, or a function of an `OwnedParameter`."""


def norms_and_biases(owned: OwnedParameter) -> bool:
    """Select parameters with fewer than two dims: biases, and the weights of normalization layers."""
    return owned.parameter.dim() < 2


def embeddings(owned: OwnedParameter) -> bool:
    """Select the tables of embedding layers, also where another layer shares them."""
    return isinstance(owned.module, (nn.Embedding, nn.EmbeddingBag))


def matrices(owned: OwnedParameter) -> bool:
    """Select matrices that are not embedding tables."""
    return owned.parameter.dim() == 2 and not embeddings(owned)


def experts(owned: OwnedParameter) -> bool:
    """Select the stacked matrices of experts: parameters of three dims below a module named `experts`."""
    return owned.parameter.dim() == 3 and "experts" in owned.name.split(".")


def param_groups(
    model: nn.Module, rules: Mapping[Selector, Mapping[str, Any]], *, default: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, with settings chosen by parameter name.

    A parameter takes the settings of the first rule that selects it. The first group holds the parameters
    that no rule selects; the groups of the rules follow in their order. Parameters that do not require
    gradients are included, as in `model.parameters()`.

    Args:
        model: The model, before it is sharded or compiled.
        rules: Settings by selector: a glob such as `"*.bias"` or `"blocks.0.*"`, or a function such as
            `norms_and_biases`.
        default: Settings of the parameters that no rule selects.

    Raises:
        TrainerConfigError: If a rule selects no parameter.

    Example:
        >>> groups = param_groups(model, {norms_and_biases: {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}})
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    """
    chosen: dict[Selector, list[nn.Parameter]] = {selector: [] for selector in rules}
    rest: list[nn.Parameter] = []
    selected: set[Selector] = set()
    names: list[str] = []
    for owned in owned_parameters(model):
        names.append(owned.name)
        matching = [selector for selector in rules if _selects(selector, owned)]
        selected.update(matching)
        (chosen[matching[0]] if matching else rest).append(owned.parameter)
    for selector in rules:
        if selector not in selected:
            raise TrainerConfigError(_describe_unmatched(selector, names))
    groups: list[dict[str, Any]] = [{"params": rest, **(default or {})}] if rest else []
    for selector, options in rules.items():
        if chosen[selector]:
            groups.append({"params": chosen[selector], **options})
    return groups


def owned_parameters(model: nn.Module) -> list[OwnedParameter]:
    """Return each parameter once, with the first module that owns it.

    A table that an embedding shares with another layer counts as the embedding's.
    """
    owned_by_parameter: dict[nn.Parameter, OwnedParameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            owned = OwnedParameter(plain_name(name), parameter, module)
            previous = owned_by_parameter.setdefault(parameter, owned)
            if embeddings(owned) and not embeddings(previous):
                owned_by_parameter[parameter] = previous._replace(module=module)
    return list(owned_by_parameter.values())


def _selects(selector: Selector, owned: OwnedParameter) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(owned.name, selector)
    return selector(owned)


def _describe_unmatched(selector: Selector, names: list[str]) -> str:
    if not isinstance(selector, str):
        name = getattr(selector, "__name__", selector)
        return f"`{name}` selects no parameter of the model; remove the rule"
    near = difflib.get_close_matches(selector.replace("*", ""), names, 3, 0.3) or names[:3]
    listed = ", ".join(f"`{name}`" for name in near)
    return (
        f"the pattern `{selector}` matches no parameter of the model; a pattern must match the whole name, "
        f"such as {listed}"
    )
