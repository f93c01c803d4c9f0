"""Losses, as `composer.loss`."""

from __future__ import annotations

from hocket.trainer.loss import DiceLoss, binary_cross_entropy_with_logits, soft_cross_entropy

#: Losses by name.
loss_registry = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "loss_registry", "soft_cross_entropy"]
