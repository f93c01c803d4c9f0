"""The one walk over the tensors of a batch, of a model's outputs, and of other trees of tensors."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""The keys, indices and attribute names that lead to a part."""


def children_of(part: Any, *, into_objects: bool = True) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container, each with its key, index or attribute name; None for a leaf.

    Containers are mappings (Hugging Face's `BatchEncoding` and outputs, a `TensorDict`), lists, tuples
    and deques. torch's `pytree` takes some of these for leaves.

    Args:
        part: A tree, or a part of one; a tensor is a leaf.
        into_objects: Whether instances of dataclasses and namespaces are containers, too; if False, such an
            object is a leaf, as a sample or a setting is.
    """
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, (tuple, list, deque)):
        return enumerate(part)
    if into_objects and isinstance(part, SimpleNamespace):
        return vars(part).items()
    values = field_values(part) if into_objects else None
    return None if values is None else values.items()


def field_values(part: Any) -> dict[str, Any] | None:
    """Return the fields of an instance of a dataclass by name; None for anything else."""
    if not is_dataclass(part) or isinstance(part, type):
        return None
    return {field.name: getattr(part, field.name) for field in fields(part)}


def leaves(part: Any, path: Path = (), *, into_objects: bool = True) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a tree, each with its path; see `children_of`."""
    children = None if isinstance(part, Tensor) else children_of(part, into_objects=into_objects)
    if children is None:
        yield path, part
        return
    for name, child in children:
        yield from leaves(child, (*path, name), into_objects=into_objects)


def tensors(part: Any, *, into_objects: bool = True) -> Iterator[Tensor]:
    """Yield the tensors of a tree; see `children_of`."""
    return (leaf for _, leaf in leaves(part, into_objects=into_objects) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], part: Any) -> Any:
    """Return a tree of the same types, with the result of `function` in the place of each tensor.

    Other leaves, and the fields of a dataclass that its constructor does not take, stay as they are.
    """
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, Mapping):
        return rebuilt(part, {name: map_tensors(function, value) for name, value in part.items()})
    if isinstance(part, (tuple, list, deque)):
        return rebuilt(part, [map_tensors(function, item) for item in part])
    if isinstance(part, SimpleNamespace):
        changed = copy.copy(part)
        vars(changed).update({name: map_tensors(function, value) for name, value in vars(part).items()})
        return changed
    if is_dataclass(part) and not isinstance(part, type):
        init = [field.name for field in fields(part) if field.init]
        return replace(part, **{name: map_tensors(function, getattr(part, name)) for name in init})
    return part


def to_device(part: Any, device: torch.device) -> Any:
    """Copy the tensors of a tree to `device`, without blocking if pinned; keep all other values."""
    return map_tensors(methodcaller("to", device, non_blocking=True), part)


def rebuilt(part: Any, values: Any) -> Any:
    """Return a mapping, list or tuple of the type of `part` with other values.

    A mapping that cannot be made from a dict, such as one with further arguments, becomes a dict.
    """
    if isinstance(part, Mapping):
        if type(part) is dict:
            return values
        make: Any = type(part)
        try:  # a BatchEncoding or TensorDict keeps its class, for attribute access
            return make(**values) if is_dataclass(part) else make(values)
        except TypeError:
            return values
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
