"""Losses, as `composer.loss`."""

from __future__ import annotations

import hocket.trainer.loss as _loss
from hocket.compat.composer.signatures import in_order
from hocket.trainer.loss import DiceLoss

_NAMES = {"input": "outputs", "target": "targets"}

soft_cross_entropy = in_order(
    _loss.soft_cross_entropy, "input target weight ignore_index reduction", **_NAMES
)
binary_cross_entropy_with_logits = in_order(
    _loss.binary_cross_entropy_with_logits,
    "input target weight reduction pos_weight scale_by_batch_size",
    **_NAMES,
)

#: Losses by name.
loss_registry = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "loss_registry", "soft_cross_entropy"]
