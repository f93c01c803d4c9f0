"""Operators on the meta device that save there, or need there, something else than in training."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class KnownIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes real tensors and tensors on the meta device together; the results are on the meta device.

    What is computed of real tensors alone is real, so that indices have values and shapes follow from them.
    Ranges of numbers are real, as the positions of a sequence. On the meta device `bincount` has as many bins
    as it was asked for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator of torch."""
        given = kwargs or {}
        are_meta = {one.is_meta for one in tree_leaves((args, given)) if isinstance(one, torch.Tensor)}
        if are_meta == {True, False}:
            if func._schema.is_mutable and not args[0].is_meta:
                raise NotImplementedError(f"`{func}` writes what has no value into a tensor that has values")
            args, given = tree_map(_to_meta, (args, given))
        if func.overloadpacket is torch.ops.aten.arange and str(given.get("device")) == "meta":
            return func(*args, **{**given, "device": torch.device("cpu")})
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            return _empty_bins(*args, **given)
        if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
            return func(args[0].float(), *args[1:], **given).to(args[0].dtype)
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _empty_product(*args, **given)
        return func(*args, **given)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _empty_bins(
    numbers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    if not minlength:
        raise NotImplementedError(
            "`bincount` has as many bins as the largest value says. Give `minlength`, the number of bins"
        )
    return numbers.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _empty_product(
    rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor | None = None, *_others: Any, **_named: Any
) -> torch.Tensor:
    """Return the product of rows, or of their gradients, with a stack of matrices, for each dtype."""
    if rows.ndim == 2 and matrices.ndim == 2:
        assert offs is not None
        return rows.new_empty(len(offs), rows.shape[0], matrices.shape[1])
    return rows.new_empty(*rows.shape[:-1], matrices.shape[-1])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_others: Any,
    **_named: Any,
) -> tuple[torch.Tensor, int]:
    """Return the results of attention by a fused kernel, without values, and its floating-point operations.

    On the meta device torch chooses products of whole matrices, whose scores grow with the square of the
    sequence. Training chooses a kernel without them wherever there is one for the shapes.

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
