"""The logits of model outputs, and the dim of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs: a tensor itself, or the entry `logits` of a mapping.

    Raises:
        TypeError: If there are none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(logits := outputs.get("logits"), Tensor):
        return logits
    received = f"a `{type(outputs).__name__}`"
    if isinstance(outputs, Mapping):
        received = f"a mapping with the keys {sorted(map(str, outputs))}"
    raise TypeError(
        f"the metric got {received}; expected a tensor of logits, or a mapping with the entry `logits`"
    )


def class_dim(logits: Tensor, targets: Tensor) -> int:
    """Return the dim of the classes: 1 as in torch's losses, or -1 as in language models.

    Raises:
        ValueError: If `targets` are not one index for each position.
    """
    if targets.shape == logits.shape[:1] + logits.shape[2:]:
        return 1
    if targets.shape == logits.shape[:-1]:
        return -1
    raise ValueError(
        f"`targets` have the shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}; "
        "expected the logits' shape without dim 1 or without the last dim"
    )
