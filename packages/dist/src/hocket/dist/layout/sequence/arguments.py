"""The tensors in the arguments and outputs of blocks."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.exchange import Axis, cut

_HIDDEN = ("hidden_states", "x", "hidden", "input", "inputs", "src")
"""Names of a block's input, where it is no positional argument."""
_POSITIONS = re.compile(r"position|rotary|rope|freqs|cos|sin|(^|_)pos(_|$)")
"""Names of arguments that have a row for each position."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module."""


def first_tensor(call: Call) -> torch.Tensor:
    """Return the tensor that a module acts on: the first argument, or the one of a usual name.

    Raises:
        ModelError: There is none.
    """
    args, kwargs = call
    if args and isinstance(args[0], torch.Tensor):
        return args[0]
    for name in _HIDDEN:
        if isinstance(value := kwargs.get(name), torch.Tensor):
            return value
    names = ", ".join(f"`{name}`" for name in _HIDDEN)
    raise ModelError(
        f"a block is called with {len(args)} positional arguments and {sorted(kwargs)}, expected a tensor as "
        f"the first argument, or as one of {names}. Pass the activations first"
    )


def replace_first(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Return arguments in which the tensor that a module acts on is changed."""
    args, kwargs = call
    before = first_tensor(call)
    after = change(before)
    if args and args[0] is before:
        return (after, *args[1:]), kwargs
    return args, {name: after if value is before else value for name, value in kwargs.items()}


def drawn_like(hidden: torch.Tensor) -> torch.Tensor:
    """Return random activations in place of others, equal on all ranks."""
    values = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return values.to(hidden.device, hidden.dtype)


def first_output(output: Any) -> torch.Tensor:
    """Return the tensor that a module returns, or the first one.

    Raises:
        ModelError: There is none.
    """
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, torch.Tensor):
        return first
    raise ModelError(
        f"a block returns a {type(output).__name__}, expected a tensor, or a tuple that begins with one. "
        "Return the activations first"
    )


def replace_output(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an output in which the first tensor is changed."""
    changed = change(first_output(output))
    return changed if isinstance(output, torch.Tensor) else type(output)([changed, *output[1:]])


def positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a forward method takes by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(one.name for one in inspect.signature(forward).parameters.values() if one.kind in kinds)


def part_of_positions(call: Call, axis: Axis, length: int, names: Sequence[str] = ()) -> Call:
    """Return arguments in which those with a row for each position have this rank's rows.

    Args:
        call: The arguments.
        axis: The ranks that share positions.
        length: The number of all positions.
        names: The names of positional arguments, the activations' first.
    """
    args, kwargs = call

    def part(name: str, value: Any) -> Any:
        return _part_of_rows(value, axis, length) if _POSITIONS.search(name) else value

    named = ("", *names[1:], *[""] * (len(args) - len(names)))
    return tuple(map(part, named, args)), {name: part(name, value) for name, value in kwargs.items()}


def without_cache(call: Call) -> Call:
    """Return arguments without a cache of keys, as transformers has it, which a call would change."""
    args, kwargs = call

    def kept(value: Any) -> Any:
        return None if callable(getattr(value, "get_seq_length", None)) else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _part_of_rows(value: Any, axis: Axis, length: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_part_of_rows(one, axis, length) for one in value])
    if isinstance(value, Mapping):
        return {name: _part_of_rows(one, axis, length) for name, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    for dim in (1, 0):
        if value.ndim > dim and value.shape[dim] == length:
            return cut(value, axis, dim=dim)
    return value
