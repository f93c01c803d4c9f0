"""What `scaled_dot_product_attention` saves by a fused kernel, on the meta device.

There torch chooses products of whole matrices, whose scores grow with the square of the sequence. Training
chooses a kernel without them, on CPUs and on GPUs, wherever there is one for the shapes.
"""

from typing import Any

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_others: Any,
    **_named: Any,
) -> tuple[torch.Tensor, int]:
    """Return the results of attention, without values, and its floating-point operations.

    Args:
        query: `(…, L, D)`, on the meta device.
        key: `(…, S, D)`.
        value: `(…, S, E)`.
        attn_mask: The mask; None for none.
    """
    results: torch.Tensor = _Attending.apply(query, key, value, attn_mask)
    sizes = query.shape[-1] + value.shape[-1]
    return results, 2 * query[..., 0].numel() * key.shape[-2] * sizes


class _Attending(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        # Kernels write the results in the order of memory of the queries; what follows copies them or not.
        results = torch.empty_like(query)
        if query.shape[-1] != value.shape[-1]:
            results = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # added to the scores
        ctx.save_for_backward(query, key, value, results, sums, *([] if mask is None else [mask]))
        return results

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("an estimate has no backward pass")
