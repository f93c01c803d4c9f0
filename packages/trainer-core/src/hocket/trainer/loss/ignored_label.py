"""Comparison of labels with the label that does not count."""

from __future__ import annotations

import torch
from torch import Tensor


def is_counted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return which labels count: all that differ from the ignored one, `(...) bool` as the labels.

    torch compares in the labels' dtype, in which the ignored label may be another number: -100 is 156 in
    uint8. A label that the dtype does not hold is in no place.
    """
    if not can_hold(labels.dtype, ignore_index):
        return torch.ones_like(labels, dtype=torch.bool)
    return labels != ignore_index


def can_hold(dtype: torch.dtype, number: int) -> bool:
    """Return whether a dtype holds a whole number."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max
