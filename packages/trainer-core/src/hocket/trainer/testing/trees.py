"""The comparison of nested dicts and lists of tensors and values."""

from __future__ import annotations

import copy
from typing import Any

import torch


def describe_difference(left: Any, right: Any, path: str = "") -> str | None:
    """Return the first difference of two trees in words; None if all are equal, types and dtypes included."""
    label = path or "the whole"
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _tensor_difference(left, right, label)
    if type(left) is not type(right):
        return f"`{label}` is a `{type(left).__name__}` on one side, a `{type(right).__name__}` on the other"
    if isinstance(left, dict):
        if left.keys() != right.keys():
            one_sided = sorted(map(repr, left.keys() ^ right.keys()))
            return f"`{label}` has {', '.join(one_sided)} on one side only"
        parts = [(str(key), left[key], right[key]) for key in left]
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"`{label}` has {len(left)} items on one side, {len(right)} on the other"
        parts = [(str(index), *pair) for index, pair in enumerate(zip(left, right, strict=True))]
    else:
        is_equal = left == right or (left != left and right != right)
        return None if is_equal else f"`{label}` is `{left!r}` on one side, `{right!r}` on the other"
    for name, left_part, right_part in parts:
        if difference := describe_difference(left_part, right_part, f"{path}.{name}" if path else name):
            return difference
    return None


def _tensor_difference(left: Any, right: Any, label: str) -> str | None:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return f"`{label}` is a tensor on one side only"
    if left.dtype != right.dtype or left.shape != right.shape:
        kinds = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (left, right)]
        return f"`{label}` is {kinds[0]} on one side, {kinds[1]} on the other"
    left_values, right_values = left.detach().cpu(), right.detach().cpu()
    is_equal = (left_values == right_values) | ((left_values != left_values) & (right_values != right_values))
    if not is_equal.all():
        return f"`{label}` has other values on one side than on the other"
    return None


def snapshot(tree: Any) -> Any:
    """Return a copy that shares nothing with `tree`."""
    return copy.deepcopy(tree)
