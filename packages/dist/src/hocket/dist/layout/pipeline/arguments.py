"""The arguments of blocks beside the activations, and what blocks keep: stages do not send either."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.dist.errors import ModelError

_log = logging.getLogger("hocket.dist")

_LIKENESS = 0.05
"""The part of its norm by which an argument may differ between stages, as low precision makes it differ."""
_MOST_ELEMENTS = 2**20
"""The elements of an argument that are looked at."""
_LARGEST = 1e30
"""The number by which larger ones are replaced: masks have the least number of their dtype."""


class Beside(NamedTuple):
    """An argument of a block beside the activations."""

    block: str
    shape: tuple[int, ...]
    marks: list[float]
    """Its norm, and two sums that tell it from others."""


def beside(block: str, hidden: torch.Tensor, values: Iterable[Any]) -> list[Beside]:
    """Return the numbers and tensors among the values, but for the activations and their views."""
    found = []
    for value in values:
        if isinstance(value, (int, float)):
            found.append(Beside(block, (), [float(value), float(value), 0.0]))
            continue
        is_read = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel()
        if is_read and value.data_ptr() != hidden.data_ptr():
            found.append(Beside(block, tuple(value.shape), _marks_of(value)))
    return found


def check_beside(found: Sequence[Sequence[Beside]]) -> None:
    """Refuse arguments that differ between the ranks of a pipeline, since each stage computes its own.

    Args:
        found: The arguments of all blocks on each rank, in the order of the calls.

    Raises:
        ModelError: One differs.
    """
    for rank, others in enumerate(found):
        for first, other in zip(found[0], others, strict=False):
            if not _is_like(first.marks, other.marks):
                raise ModelError(
                    f"`{first.block}` gets, beside the activations, a value of the shape {first.shape} that "
                    f"is another one on rank {rank} of `pp` than on rank 0: it is computed with parameters "
                    "that only one stage has, also where it has no gradients, or drawn at random. Compute "
                    "it in the block, or in the loader as a part of the batch, or leave `pp` out"
                )


def warn_of_kept(name: str, block: nn.Module) -> None:
    """Warn of a tensor with gradients that a block keeps, as for a term of the loss."""
    for prefix, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                _log.warning(
                    "`%s` keeps `%s`, a tensor with gradients. With `pp`, a loss that takes it has no such "
                    "term of the blocks of other stages. Detach it if it is only shown",
                    prefix,
                    key,
                )
                return


def _marks_of(value: torch.Tensor) -> list[float]:
    flat = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    flat = flat.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // _MOST_ELEMENTS)].double()
    flat = flat.nan_to_num(posinf=_LARGEST, neginf=-_LARGEST).clamp(-_LARGEST, _LARGEST)
    waves = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    return [float(flat.norm()), float(flat @ waves.mul(1.7).cos()), float(flat @ waves.mul(0.6).sin())]


def _is_like(marks: Sequence[float], others: Sequence[float]) -> bool:
    largest = max(map(abs, (*marks, *others)))
    return all(abs(a - b) <= _LIKENESS * largest for a, b in zip(marks, others, strict=True))
