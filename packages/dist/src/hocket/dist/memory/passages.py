"""The activations that modules get and give in a forward pass, and those that are computed again."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """The activations that a module gets and gives in a forward pass.

    Attributes:
        into: Bytes of the first tensor that it gets.
        out: Bytes of the first tensor that it gives.
        rows: The number of rows of what it gives, along the last dim.
        is_got_again: Whether activation checkpointing, where it is on, computes again what the module gets.
        is_given_again: Whether it also computes again what the module gives. It ends where all tensors that
            backward needs are there, which may be before the last layer of a block has its sum.
    """

    into: int = 0
    out: int = 0
    rows: int = 0
    is_got_again: bool = False
    is_given_again: bool = False


def passage_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Passage:
    """Return what a module gets and gives in a call."""
    given = _first((*args, *kwargs.values()))
    result = _first(output if isinstance(output, (tuple, list)) else (output,))
    return Passage(into=given.nbytes, out=result.nbytes, rows=math.prod(result.shape[:-1]))


def mark_again(
    passed: Mapping[str, Passage], num_saved: Mapping[str, int], selected: Collection[str]
) -> dict[str, Passage]:
    """Return passages with what activation checkpointing computes again.

    Args:
        passed: The passages by the modules' names.
        num_saved: The tensors that were saved for backward up to the end of each module.
        selected: The modules on which activation checkpointing acts.
    """
    marked = {}
    for name, passage in passed.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in selected:
            outer = outer.rpartition(".")[0]
        is_inside = outer in selected and outer in passed
        # Torch stops the second pass once it has as many tensors as the first one saved.
        is_given_again = is_inside and num_saved[name] < num_saved[outer]
        marked[name] = replace(passage, is_got_again=is_inside, is_given_again=is_given_again)
    return marked


def _first(values: Collection[Any]) -> torch.Tensor:
    """Return the first tensor; an empty one if there is none."""
    return next((one for one in values if isinstance(one, torch.Tensor)), torch.empty(0, device="meta"))
