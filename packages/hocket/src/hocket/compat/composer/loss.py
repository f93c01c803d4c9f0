"""Losses, as `composer.loss`."""

from __future__ import annotations

import torch

import hocket.trainer.loss as _loss
from hocket.compat.composer.signatures import class_in_order, in_order
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loss.cross_entropy import as_dense

_NAMES = {"input": "outputs", "target": "targets"}

soft_cross_entropy = in_order(
    _loss.soft_cross_entropy, "input target weight ignore_index reduction", **_NAMES
)
binary_cross_entropy_with_logits = in_order(
    _loss.binary_cross_entropy_with_logits,
    "input target weight reduction pos_weight scale_by_batch_size",
    **_NAMES,
)

DiceLoss = class_in_order(
    _loss.DiceLoss,
    "sigmoid softmax squared_pred jaccard batch ignore_absent_classes reduction",
    __name__,
)


def infer_target_type(input: torch.Tensor, targets: torch.Tensor) -> str:  # noqa: A002 - Composer's name
    """Return `one_hot` for targets of the shape of the logits, and `indices` for one dim less.

    Raises:
        TrainerConfigError: If the targets have neither shape.
    """
    if targets.shape == input.shape:
        return "one_hot"
    if targets.ndim == input.ndim - 1:
        return "indices"
    raise TrainerConfigError(
        f"`targets` has the shape {tuple(targets.shape)} beside logits of {tuple(input.shape)}; expected the "
        "same shape, or class indices without the dim of classes"
    )


def check_for_index_targets(targets: torch.Tensor) -> bool:
    """Return whether targets are of an integer type, as class indices are."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def ensure_targets_one_hot(
    input: torch.Tensor,  # noqa: A002 - Composer's name
    targets: torch.Tensor,
    num_classes: int | None = None,
) -> torch.Tensor:
    """Return targets as floats with a dim of classes, whether they are indices or have it already.

    Args:
        input: The logits, `(N, C, ...)`.
        targets: Class indices `(N, ...)`, or values of the shape of `input`.
        num_classes: C; by default that of `input`.

    Raises:
        TrainerConfigError: If the targets have neither shape.
    """
    if infer_target_type(input, targets) == "one_hot":
        return targets.float()
    num = input.shape[1] if num_classes is None else num_classes
    shape = (input.shape[0], num, *input.shape[2:])
    return as_dense(input.new_empty(shape, dtype=torch.float32), targets)


#: Losses by name.
loss_registry = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "soft_cross_entropy": soft_cross_entropy,
}

__all__ = [
    "DiceLoss",
    "binary_cross_entropy_with_logits",
    "check_for_index_targets",
    "ensure_targets_one_hot",
    "infer_target_type",
    "loss_registry",
    "soft_cross_entropy",
]
