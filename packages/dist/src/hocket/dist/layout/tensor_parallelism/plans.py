"""Plans of tensor parallelism: which modules are cut, and how.

A plan comes from the user, from the model (its attribute `tp_plan`, as transformers' models have it), or for
transformers' GPT-2 and BERT, which have none, from here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hocket.dist.config.axes import CP, TP
from hocket.dist.config.context_parallel import RING_ADVICE, ContextParallelConfig
from hocket.dist.config.tensor_parallel import Plan, Style, check_style
from hocket.dist.errors import ConfigError, ModelError

_GPT2 = {
    "h.*.attn.c_attn": "packed_colwise:3",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_PLANS = {"GPT2Model": _GPT2, "BertModel": _BERT}
"""Plans by the name of the class."""

DIVIDED = {"GPT2Attention": ("split_size", "num_heads")}
"""Numbers of a module, by the name of its class, of which each rank has its share once it is cut."""

_EXPERTS = ("moe_tp_experts",)
"""Styles of modules that stay whole, with all that is inside: their inputs and outputs are whole, too."""

_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
_ATTENTION = re.compile(r"attn|attention|qkv")


def find_plan(model: nn.Module, plan: Plan | None) -> dict[str, Style]:
    """Return the style of each module that a plan cuts, by the module's name.

    Args:
        model: The model.
        plan: The user's; None finds the model's own.

    Raises:
        ConfigError: There is no plan, it names no module of the model, or has an unknown style.
    """
    if callable(plan):
        styles = {name: style for name, module in model.named_modules() if (style := plan(name, module))}
        for name, style in styles.items():
            check_style(style, name)
        if not styles:
            raise ConfigError(
                f"the function `plan` in `parallelism_config['tp']` returns no style for any module of "
                f"{type(model).__name__}. Return a style such as 'colwise' for the modules to cut"
            )
    elif plan is not None:
        styles = _resolve(model, plan)
    else:
        styles = _own_plan(model)
    return {name: style for name, style in styles.items() if style != "replicate"}


def check_heads(
    model: nn.Module,
    styles: Mapping[str, Style] | None,
    degree: int,
    *,
    axes: str = "`tp`",
    advice: str = "",
) -> None:
    """Refuse attention heads that ranks cannot share evenly.

    Args:
        model: The model.
        styles: The plan, if only heads of layers that it cuts are shared.
        degree: The number of ranks.
        axes: The ranks' axes, for messages.
        advice: What else may be done.

    Raises:
        ModelError: They cannot.
    """
    for prefix, module in model.named_modules():
        config = getattr(module, "config", None)
        inside = f"{prefix}." if prefix else ""
        names = [name for name, _ in model.named_modules()] if styles is None else styles
        if config is None or not any(
            name.startswith(inside) and _ATTENTION.search(name.removeprefix(inside)) for name in names
        ):
            continue
        for key in _HEADS:
            heads = getattr(config, key, None)
            if isinstance(heads, int) and heads % degree:
                raise ModelError(
                    f"{type(module).__name__} has `{key}` {heads}, which {degree} ranks of {axes} cannot "
                    f"share evenly. Choose a degree that divides {heads}{advice and f', or {advice}'}"
                )
        return


def check_sequence_heads(model: nn.Module, config: ContextParallelConfig, tensor: int) -> None:
    """Refuse attention heads that ranks which exchange positions for heads cannot share evenly.

    Args:
        model: The model.
        config: The ranks that share each sequence; those of a ring share no heads.
        tensor: The ranks that share each matrix.

    Raises:
        ModelError: They cannot.
    """
    if not config.is_ring:
        axes = f"`{CP}`" if tensor == 1 else f"`{CP}` × `{TP}`"
        check_heads(model, None, config.degree * tensor, axes=axes, advice=RING_ADVICE)


def _own_plan(model: nn.Module) -> dict[str, Style]:
    """Return the plan of the model, or the plans of the models inside it."""
    styles: dict[str, Style] = {}
    for prefix, plan in _plans_of(model, ""):
        experts = [name for name, style in plan.items() if style in _EXPERTS]
        for pattern, style in plan.items():
            if any(pattern == name or pattern.startswith(f"{name}.") for name in experts):
                continue
            for name, _ in _matching(model, pattern, prefix):
                check_style(style, name)
                styles[name] = style
    if not styles:
        known = " or ".join(f"`{name}`" for name in _PLANS)
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan: no attribute `tp_plan`, and no {known} "
            "inside. Give `plan` in `parallelism_config['tp']`, such as {'*.up': 'colwise'}"
        )
    return styles


def _plans_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    plan = getattr(module, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        yield prefix, plan
    elif type(module).__name__ in _PLANS:
        yield prefix, _PLANS[type(module).__name__]
    else:
        for name, child in module.named_children():
            yield from _plans_of(child, f"{prefix}{name}.")


def _resolve(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Return the modules that the user's patterns name; later patterns win."""
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        matching = list(_matching(model, pattern, None))
        if not matching:
            names = list(
                dict.fromkeys(re.sub(r"\d+", "*", name) for name, _ in model.named_modules() if name)
            )
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"Did you mean `{nearest[0]}`?" if nearest else f"It has `{'`, `'.join(names[:5])}`"
            raise ConfigError(
                f"the tensor-parallel plan names `{pattern}`, which is no module of {type(model).__name__}. "
                f"{hint}"
            )
        styles |= {name: style for name, _ in matching}
    return styles


def _matching(model: nn.Module, pattern: str, prefix: str | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a pattern names, from `prefix` on, or from any dot on if that is None."""
    text = ".*".join(map(re.escape, pattern.split("*")))
    expression = re.compile((r"(?:.*\.)?" if prefix is None else re.escape(prefix)) + text)
    for name, module in model.named_modules():
        if name and expression.fullmatch(name):
            yield name, module
