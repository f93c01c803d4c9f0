"""What a rank of tensor parallelism has of a model, as a model on the meta device, and what it sends."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from hocket.dist.config.tensor_parallel import Plan, Style, split_style
from hocket.dist.layout.tensor_parallelism.cut import divide_numbers, plan_cuts
from hocket.dist.layout.tensor_parallelism.styles import is_transposed, local_shapes


def tensor_share(model: nn.Module, plan: Plan | None, degree: int) -> tuple[nn.Module, dict[str, Style]]:
    """Return the part of a model that each rank of the axis `tp` has, and the style of each cut module.

    Its forward pass computes and saves what that of a rank does; what ranks send each other is left out.

    Args:
        model: Plain.
        plan: The user's plan; None finds the model's own.
        degree: The ranks of the axis, at least two.

    Raises:
        ConfigError, ModelError: The model cannot be cut over this many ranks.
    """
    styles = plan_cuts(model, plan, degree)
    share = copy.deepcopy(model).to("meta")
    made: dict[nn.Parameter, nn.Parameter] = {}  # one for each, so that tied weights stay tied
    for name, style in styles.items():
        module = share.get_submodule(name)
        for key, shape in local_shapes(style, name, module, degree).items():
            whole = module.get_parameter(key)
            if whole not in made:
                empty = torch.empty(shape, dtype=whole.dtype, device="meta")
                made[whole] = nn.Parameter(empty, requires_grad=whole.requires_grad)
            module.register_parameter(key, made[whole])
        if is_transposed(module):  # the shape of its output is by its own number
            setattr(module, "nf", module.get_parameter("weight").shape[1])  # noqa: B010 - typed as a module
        if isinstance(style, str) and split_style(style)[0] in ("colwise_gather_output", "embedding_colwise"):
            module.register_forward_hook(lambda _module, _args, output: torch.cat([output] * degree, -1))
        if isinstance(style, str) and split_style(style)[0] == "rowwise_split_input":
            module.register_forward_pre_hook(lambda _module, args: (args[0].chunk(degree, -1)[0], *args[1:]))
    divide_numbers(share, styles, degree)
    return share, styles


def tensor_traffic(
    styles: Mapping[str, Style], exchanged: Mapping[str, tuple[int, int]], degree: int
) -> float:
    """Return the bytes that a rank of the axis `tp` sends in the forward and backward pass of a microbatch.

    Args:
        styles: The style of each cut module.
        exchanged: The bytes of the input and of the output of each module of the whole model.
        degree: The ranks of the axis.
    """
    sent = (degree - 1) / degree  # of the bytes of an all-gather; twice that for a sum
    total = 0.0
    for name, style in styles.items():
        into, out = exchanged.get(name, (0, 0))
        kind = split_style(style)[0] if isinstance(style, str) else ""
        if kind in ("rowwise", "rowwise_split_input", "embedding_rowwise"):
            total += 2 * sent * out
        elif kind in ("colwise", "colwise_gather_output", "packed_colwise"):
            total += 2 * sent * into
        if kind in ("colwise_gather_output", "embedding_colwise"):
            total += sent * out
        if kind == "packed_colwise":
            total += 2 * sent * out / degree  # shares change hands, there and back
    return total
