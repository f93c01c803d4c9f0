"""What a rank of tensor parallelism has of a model, as a model on the meta device."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hocket.dist.config.tensor_parallel import Style, TensorParallelConfig, split_style
from hocket.dist.layout.sequence.arguments import replace_first, replace_output
from hocket.dist.layout.sequence.blocks import SequenceBlocks, find_blocks
from hocket.dist.layout.tensor_parallelism.cut import divide_numbers, plan_cuts
from hocket.dist.layout.tensor_parallelism.loss import find_head
from hocket.dist.layout.tensor_parallelism.sequence import add_sequence_styles, modules_between, takers
from hocket.dist.layout.tensor_parallelism.styles import is_transposed, local_shapes


def tensor_share(
    model: nn.Module, config: TensorParallelConfig, degree: int
) -> tuple[nn.Module, dict[str, Style]]:
    """Return the part of a model that each rank of the axis `tp` has, and the style of each cut module.

    Its forward pass computes and saves what that of a rank does; what ranks send each other is left out.

    Args:
        model: Plain.
        config: The plan, and whether ranks share activations and logits; its degree is ignored.
        degree: The ranks of the axis, at least two.

    Raises:
        ConfigError, ModelError: The model cannot be cut over this many ranks.
    """
    styles = plan_cuts(model, config.plan, degree)
    share = copy.deepcopy(model).to("meta")
    head = find_head(share, styles) if config.loss_parallel else None
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
        kind = _kind(style)
        if kind in ("colwise_gather_output", "embedding_colwise") and name != head:
            module.register_forward_hook(lambda _module, _args, output: torch.cat([output] * degree, -1))
        if kind == "rowwise_split_input":
            module.register_forward_pre_hook(lambda _module, args: (args[0].chunk(degree, -1)[0], *args[1:]))
    divide_numbers(share, styles, degree)
    if head is not None:
        _divide_vocabulary(share, head, degree)
    if config.sequence_parallel:
        _cut_sequences(share, styles, degree)
    return share, styles


def _divide_vocabulary(share: nn.Module, head: str, degree: int) -> None:
    """Let the loss of transformers reshape logits of this rank's part of the vocabulary."""
    whole = len(share.get_submodule(head).get_parameter("weight")) * degree
    for module in share.modules():
        for owner in (module, getattr(module, "config", None)):
            if getattr(owner, "vocab_size", None) == whole:
                setattr(owner, "vocab_size", whole // degree)  # noqa: B010 - of any class


def _cut_sequences(share: nn.Module, styles: Mapping[str, Style], degree: int) -> None:
    """Give the modules between cut layers a part of each sequence, as `attach_sequence` does on ranks."""
    name, blocks = find_blocks(share, "`sequence_parallel`")
    add_sequence_styles(styles, SequenceBlocks(name, blocks, []))  # refuses what training refuses

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(degree, 1)[0]

    def gather(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part] * degree, 1)

    def take(change: Any) -> Any:
        return lambda _module, args, kwargs: replace_first((args, kwargs), change)

    def give(change: Any) -> Any:
        return lambda _module, _args, output: replace_output(output, change)

    for key, block in blocks.items():
        for taker in takers(key, styles):
            share.get_submodule(taker).register_forward_pre_hook(take(gather), with_kwargs=True)
        for inside, style in styles.items():
            if inside.startswith(f"{key}.") and _kind(style) == "rowwise":
                share.get_submodule(inside).register_forward_hook(give(cut))
        for _, module, is_norm in modules_between(key, block, styles):
            if not is_norm:
                module.register_forward_pre_hook(take(gather), with_kwargs=True)
                module.register_forward_hook(give(cut))
    first, *_, last = [*blocks.values()] * 2
    first.register_forward_pre_hook(take(cut), with_kwargs=True)
    last.register_forward_hook(give(gather))


def _kind(style: Style) -> str:
    return split_style(style)[0] if isinstance(style, str) else ""
