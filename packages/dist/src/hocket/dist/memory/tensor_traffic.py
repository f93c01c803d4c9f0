"""The bytes that a rank of tensor parallelism sends for each module of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.tensor_parallel import Style, TensorParallelConfig, split_style
from hocket.dist.layout.tensor_parallelism.loss import find_head
from hocket.dist.layout.tensor_parallelism.sequence import modules_between, takers
from hocket.dist.memory.activations import ForwardPass
from hocket.dist.memory.passages import Passage

_SUMMED = "replicated_with_grad_allreduce"
_GATHERED = "whole sequences"
"""The kind of modules between cut layers that compute with whole sequences, beside those of the plan."""
_SUMS_OF_LOSS = 3
"""The sums over the ranks for a row of cut logits: of the largest logit, of all and of the label's."""
_FLOAT32 = 4
"""Bytes of a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTraffic:
    """The bytes that a rank of the axis `tp` sends for a module.

    Attributes:
        is_inside: Whether the module is in a block, where ranks of `cp` have parts of the sequences.
        once: Bytes for a microbatch, of whole sequences.
        again: The part of them that activation checkpointing sends once more.
        gradients: Bytes for the gradients of whole parameters, each time that they are added up.
    """

    is_inside: bool
    once: float = 0.0
    again: float = 0.0
    gradients: float = 0.0


def tensor_traffic(
    model: nn.Module,
    styles: Mapping[str, Style],
    config: TensorParallelConfig,
    degree: int,
    *,
    whole: ForwardPass,
    sharding: FSDPConfig,
) -> dict[str, ModuleTraffic]:
    """Return what a rank of the axis `tp` sends for each module that is cut or meets cut activations.

    The cut of whole sequences before the blocks and their gather after them are left out.

    Args:
        model: The whole model.
        styles: The style of each module that the plan cuts.
        config: Whether ranks share activations and logits.
        degree: The ranks of the axis.
        whole: The forward pass of the whole model.
        sharding: The dtype in which gradients are reduced.
    """
    if degree == 1:
        return {}
    blocks = {name: model.get_submodule(name) for name in whole.parts}
    kinds = {name: split_style(one) if isinstance(one, str) else ("", 1) for name, one in styles.items()}
    if config.sequence_parallel:
        for block, module in blocks.items():
            for name, _, is_norm in modules_between(block, module, styles):
                kinds[name] = (_SUMMED if is_norm else _GATHERED), 1
    head = find_head(model, styles) if config.loss_parallel else None
    found: dict[str, ModuleTraffic] = {}
    taken: set[str] = set()
    for name, (kind, number) in kinds.items():
        block = next((one for one in blocks if name.startswith(f"{one}.")), "")
        passage, has_parts = whole.passages.get(name, Passage()), bool(config.sequence_parallel and block)
        for taker in takers(block, {name: styles[name]}) if has_parts and name in styles else ():
            # The layers of a module share its gathered input, and the sum of their gradients.
            is_again = whole.passages.get(taker, Passage()).is_got_again
            passage = replace(passage, into=0 if taker in taken else passage.into, is_got_again=is_again)
            taken.add(taker)
        got, given, back = _sent(kind, passage, degree, number, has_parts=has_parts, is_loss=name == head)
        trained = [one for one in model.get_submodule(name).parameters() if one.requires_grad]
        itemsize = (sharding.policy_for(trained).reduce_dtype or torch.float32).itemsize
        summed = sum(one.numel() for one in trained) * itemsize if kind == _SUMMED else 0
        found[name] = ModuleTraffic(
            is_inside=bool(block),
            once=got + given + back,
            again=got * passage.is_got_again + given * passage.is_given_again,
            gradients=2 * (degree - 1) / degree * summed,
        )
    return found


def _sent(
    kind: str, passage: Passage, degree: int, number: int, *, has_parts: bool, is_loss: bool
) -> tuple[float, float, float]:
    """Return the bytes that a rank sends before the forward pass of a module, after it, and in backward.

    Args:
        kind: Its style, or `_GATHERED`.
        passage: Its activations.
        degree: The ranks.
        number: The matrices that it stores as one.
        has_parts: Whether ranks have parts of the sequences around it.
        is_loss: Whether the loss takes its cut output.
    """
    part = (degree - 1) / degree  # of an all-gather, or of a sum of which each rank gets its part
    into, out = part * passage.into, part * passage.out
    match kind:
        case "colwise" | "packed_colwise" | "colwise_gather_output":
            moved = _moved(number, degree) * passage.out / degree if number > 1 else 0.0
            logits = 2 * _SUMS_OF_LOSS * part * passage.rows * _FLOAT32 if is_loss else out
            given = logits if kind == "colwise_gather_output" else moved
            return (into, given, into + moved) if has_parts else (0.0, given, 2 * into + moved)
        case "rowwise":
            return (0.0, out, out) if has_parts else (0.0, 2 * out, 0.0)
        case "rowwise_split_input":
            return 0.0, 2 * out, into
        case "embedding_rowwise":
            return 0.0, 2 * out, 0.0
        case "embedding_colwise":
            return 0.0, out, 0.0
    return (into, 0.0, out) if kind == _GATHERED else (0.0, 0.0, 0.0)


def _moved(number: int, degree: int) -> float:
    """Return the part of the outputs of some matrices, stored as one, that belong to another rank's heads.

    A rank has one of `degree` consecutive parts of all rows, and the heads of each matrix in that place.
    """
    kept = sum(row % degree == row // number for row in range(number * degree))
    return 1 - kept / (number * degree)
