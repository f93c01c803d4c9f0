"""The cross-entropy of a linear layer's output, without storing the output."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_variadic

from hocket.trainer.errors import TrainerConfigError

# Logits of a chunk, in elements: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 - torch's name for it
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(input, linear_weight, linear_bias), target)` in little memory.

    With V classes the logits of N tokens take N x V numbers, and their gradients as many again; for a
    vocabulary of 128,000 they are most of a language model's memory. Here the logits of `chunk_size` tokens
    exist at a time: the forward pass computes each chunk's loss and gradients and drops its logits. Losses
    and sums of gradients are computed in float32, also for bf16 inputs and under autocast.

    Call it inside of the model's `forward`, where a sharded weight is whole. The result can be differentiated
    once.

    Args:
        input: `(..., D)` float, the last hidden states.
        linear_weight: `(V, D)` float, the weight of the output layer.
        target: `(...)` int64, class indices; those equal to `ignore_index` are left out of the loss.
        linear_bias: `(V,)` float.
        reduction: `"mean"` over the targets that are not ignored, or their `"sum"`.
        ignore_index: The class index of targets to ignore.
        label_smoothing: The share of each target that is spread over all classes.
        chunk_size: Tokens whose logits exist at a time; None for 64 MiB of logits in float32.

    Returns:
        A scalar in float32 (float64 for float64 inputs).

    Raises:
        TrainerConfigError: If shapes do not match, the reduction is unknown, or the weight is sharded.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, section 4, for the
    computation of gradients in the forward pass.
    """
    if has_torch_function_variadic(input, linear_weight, target):
        return handle_torch_function(
            linear_cross_entropy,
            (input, linear_weight, target),
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            chunk_size=chunk_size,
        )
    _check(input, linear_weight, target, linear_bias, reduction, label_smoothing, chunk_size)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        linear_weight = linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    rows = input.reshape(-1, input.shape[-1]).to(linear_weight.dtype)
    size = max(1, _CHUNK_ELEMENTS // linear_weight.shape[0]) if chunk_size is None else chunk_size
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(
            rows,
            linear_weight,
            linear_bias,
            target.reshape(-1),
            reduction,
            ignore_index,
            label_smoothing,
            size,
        )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the loss and all gradients chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        reduction: str,
        ignore_index: int,
        smoothing: float,
        size: int,
    ) -> Tensor:
        wide_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        is_kept = target != ignore_index
        scale = torch.ones((), dtype=wide_dtype, device=rows.device)
        if reduction == "mean":
            scale = scale / is_kept.sum()
        total = torch.zeros((), dtype=wide_dtype, device=rows.device)
        d_rows = torch.empty_like(rows) if needs_rows else None
        d_weight = torch.zeros_like(weight, dtype=wide_dtype) if needs_weight else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=wide_dtype) if needs_bias else None
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            x, is_part_kept = rows[part], is_kept[part]
            labels = torch.where(is_part_kept, target[part], 0)[:, None]
            logits = torch.nn.functional.linear(x, weight, bias).to(wide_dtype)
            logits -= torch.logsumexp(logits, dim=1, keepdim=True)  # log-probabilities from here on
            losses = -(1.0 - smoothing) * logits.gather(1, labels)[:, 0]
            if smoothing:
                losses -= smoothing * logits.mean(dim=1)
            total += torch.where(is_part_kept, losses, 0.0).sum()
            if not any(ctx.needs_input_grad[:3]):
                continue
            gradient = logits.exp_()
            gradient.scatter_add_(1, labels, torch.full_like(labels, smoothing - 1.0, dtype=wide_dtype))
            if smoothing:
                gradient -= smoothing / len(weight)
            # A factor for each row: 0 where the target is ignored.
            gradient *= torch.where(is_part_kept, scale, 0.0)[:, None]
            if d_bias is not None:
                d_bias += gradient.sum(dim=0)
            gradient = gradient.to(weight.dtype)
            if d_rows is not None:
                torch.mm(gradient, weight, out=d_rows[part])
            if d_weight is not None:
                if weight.dtype == wide_dtype:
                    d_weight.addmm_(gradient.T, x)
                else:
                    d_weight += gradient.T @ x
        ctx.gradients = (
            d_rows,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(weight.dtype),
        )
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of `linear_cross_entropy` were used already; call it again for a second "
                "backward pass"
            )
        # In place: a second copy of the weight's gradient would take the memory that the chunks saved.
        gradients = [None if gradient is None else gradient.mul_(grad) for gradient in ctx.gradients]
        ctx.gradients = None
        return (*gradients, None, None, None, None, None)


def _check(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    smoothing: float,
    size: int | None,
) -> None:
    if hasattr(weight, "placements"):
        raise TrainerConfigError(
            "`linear_weight` is sharded; call `linear_cross_entropy` in the `forward` of the module that "
            "owns the weight, where it is whole"
        )
    if weight.dim() != 2 or rows.shape[-1:] != weight.shape[1:]:
        raise TrainerConfigError(
            f"`input` has the shape {tuple(rows.shape)} and `linear_weight` {tuple(weight.shape)}; "
            "expected `(..., D)` and `(V, D)`"
        )
    if target.shape != rows.shape[:-1] or target.is_floating_point():
        raise TrainerConfigError(
            f"`target` has the shape {tuple(target.shape)} and the type `{target.dtype}`; expected "
            f"class indices of the shape {tuple(rows.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise TrainerConfigError(
            f"`linear_bias` has the shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}"
        )
    if reduction not in ("mean", "sum"):
        raise TrainerConfigError(f"`reduction` is `{reduction}`; expected `mean` or `sum`")
    if not 0.0 <= smoothing <= 1.0 or (size is not None and size < 1):
        raise TrainerConfigError(
            f"`label_smoothing` is {smoothing} and `chunk_size` {size}; expected 0 to 1, and at least 1"
        )
