"""Cross-entropies that take class indices or dense targets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import handle_torch_function, has_torch_function_variadic

Reduction = Literal["mean", "sum", "none"]


def soft_cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy with targets that are class indices or class probabilities.

    Args:
        outputs: Logits, `(N, C)` or `(N, C, ...)`.
        targets: Indices `(N,)` or `(N, ...)`, integer; or probabilities of the shape of `outputs`, floating
            point, as MixUp makes them.
        weight: The weight of each class, `(C,)`.
        ignore_index: Positions with this index do not count. With probabilities, those of 0 alone do not.
        reduction: `"mean"` over the positions (weighted by class for indices, and by their total probability
            for probabilities, as in Composer), `"sum"` or `"none"`.
        label_smoothing: The share of the target spread over all classes.

    Returns:
        A scalar; with `"none"`, the shape of `outputs` without dim 1.

    Raises:
        ValueError: If the targets have neither shape.
    """
    if has_torch_function_variadic(outputs, targets):  # as in torch's own losses, for modes that observe them
        return handle_torch_function(
            soft_cross_entropy,
            (outputs, targets),
            outputs,
            targets,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if is_dense(outputs, targets):
        # Probabilities in fp32 stay so beside logits in half precision, which would round them.
        is_wide = targets.dtype is torch.float32
        dtype = torch.promote_types(outputs.dtype, torch.float32) if is_wide else outputs.dtype
        loss = cross_entropy(
            outputs, targets.to(dtype), weight, reduction=reduction, label_smoothing=label_smoothing
        )
        if reduction != "mean":
            return loss
        num_positions = outputs.numel() // outputs.shape[1]
        return loss * (num_positions / targets.sum(dtype=torch.float32)).to(loss.dtype)
    check_indices(outputs, targets)
    return cross_entropy(
        outputs,
        targets.long(),
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def binary_cross_entropy_with_logits(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: Reduction = "sum",
    scale_by_batch_size: bool = True,
) -> Tensor:
    """Return the sum over classes of independent binary cross-entropies, averaged over the samples.

    Args:
        outputs: Logits, `(N, C)` or `(N, C, ...)`.
        targets: Indices `(N,)` or `(N, ...)`, integer; or values from 0 to 1 of the shape of `outputs`.
        weight: The weight as in `torch.nn.functional.binary_cross_entropy_with_logits`.
        pos_weight: The weight of positive targets, as in torch.
        reduction: `"sum"`, `"mean"` over every output, or `"none"`.
        scale_by_batch_size: Divide the sum by N.

    Returns:
        A scalar; with `"none"`, the shape of `outputs`.

    Raises:
        ValueError: If the targets have neither shape.
    """
    if has_torch_function_variadic(outputs, targets):
        return handle_torch_function(
            binary_cross_entropy_with_logits,
            (outputs, targets),
            outputs,
            targets,
            weight=weight,
            pos_weight=pos_weight,
            reduction=reduction,
            scale_by_batch_size=scale_by_batch_size,
        )
    loss = nn.functional.binary_cross_entropy_with_logits(
        outputs, as_dense(outputs, targets), weight, reduction=reduction, pos_weight=pos_weight
    )
    return loss / outputs.shape[0] if scale_by_batch_size and reduction == "sum" else loss


def is_dense(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets have a value for each class."""
    return targets.shape == outputs.shape and targets.is_floating_point()


def check_indices(outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets that are not one class index for each position.

    Raises:
        ValueError: If they are not.
    """
    if targets.is_floating_point() or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise ValueError(
            f"`targets` are `{targets.dtype}` of shape {tuple(targets.shape)} for `outputs` of shape "
            f"{tuple(outputs.shape)}; expected integer class indices without dim 1, or floating-point "
            "values of the outputs' shape"
        )


def as_dense(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return targets with a value for each class, in the shape and dtype of `outputs`.

    A negative index means that a position has no class: all of its values are 0.
    """
    if is_dense(outputs, targets):
        return targets.to(outputs.dtype)
    check_indices(outputs, targets)
    indices = targets.long().unsqueeze(1)
    dense = torch.zeros(outputs.shape, dtype=outputs.dtype, device=outputs.device)
    return dense.scatter_(1, indices.clamp(min=0), (indices >= 0).to(outputs.dtype))
