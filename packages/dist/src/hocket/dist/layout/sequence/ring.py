"""Attention over sequences that are cut: keys and values travel around the ranks (ring attention).

Each rank keeps the queries of its positions, attends to the keys of each rank in turn, and merges the results
(Liu et al., arXiv:2310.01889). Any number of ranks can share any number of heads.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.attention import SequenceAttention
from hocket.dist.layout.sequence.exchange import Axis, part_of, refuse_second_derivatives
from hocket.dist.layout.sequence.kernels import FEATURES, Kernel, find_kernel
from hocket.dist.layout.sequence.torch_ring import TorchRing

_INSTEAD = "leave the method 'ring' out: Ulysses, the default, does it"
_HIDDEN = -3e4
"""The bias of a hidden score: its exponential is 0, and the sum of hidden scores is finite."""


class RingAttention(SequenceAttention):
    """The mode in which `scaled_dot_product_attention` takes cut sequences, and keys travel around the ranks.

    Without a mask, causal attention computes the scores of earlier positions alone, as many on each rank;
    with a mask, those of all positions.

    Args:
        axis: The ranks that share a sequence. Each has a part of its head and one of its tail.
        blocks: The name of the blocks, for messages.
        config: The settings.
    """

    def __init__(self, axis: Axis, blocks: str, config: ContextParallelConfig) -> None:
        super().__init__(axis, blocks)
        self._rotate_method = config.rotation
        self._ring = TorchRing()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        self._check(query, key, value, attn_mask, dropout_p, is_causal)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            query, key, value = query.to(low), key.to(low), value.to(low)
        own_features, scale = value.shape[-1], options.get("scale")
        settings = {
            "is_causal": is_causal,
            "rotate_method": self._rotate_method,
            "scale": 1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        }
        width = max(query.shape[-1], own_features)
        width += -width % FEATURES
        padded = (F.pad(one, (0, width - one.shape[-1])) for one in (query, key, value))
        out: torch.Tensor = _Ring.apply(*padded, attn_mask, self._axis, self._ring, settings)
        return out[..., :own_features]

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> None:
        """Refuse attention that the ring does not compute.

        Raises:
            ModelError: It has dropout, a mask that needs gradients, or tensors that do not fit.
        """
        self._check_positions(query, key)
        axis = self._axis.name
        if mask is not None and mask.requires_grad:
            raise ModelError(
                f"attention has a mask of the shape {tuple(mask.shape)} that needs gradients, which `{axis}` "
                f"with the method 'ring' does not compute. Detach it, or {_INSTEAD}"
            )
        if mask is not None and is_causal:
            raise ModelError(
                f"attention has a mask of the shape {tuple(mask.shape)} and `is_causal=True`. Give "
                "one of them"
            )
        if mask is not None:
            self._check_mask(mask, query.shape[2] * self._axis.size)
        if dropout_p > 0:
            raise ModelError(
                f"attention has dropout of the rate {dropout_p:g}, which `{axis}` with the method 'ring' "
                f"does not compute. Set the rate to 0, or {_INSTEAD}"
            )
        if query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3] or len(query) != len(key):
            raise ModelError(
                f"attention has queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
                f"{tuple(value.shape)}, expected those of one batch, in which the heads of keys divide those "
                f"of queries. Expand them, or {_INSTEAD}"
            )


class _Ring(torch.autograd.Function):
    """Ring attention, whose backward pass sends keys and their gradients around once more."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        axis: Axis,
        ring: TorchRing,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        kernel = find_kernel(query, has_bias=mask is not None)
        attend = _on_each_part(kernel.attend, mask, axis, query.dtype)
        out, logsumexp, *state = ring.attend(axis.group, attend, (query, key, value), **settings)
        if mask is not None:
            out = out * _sees_any(mask, axis)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp, *state)
        ctx.axis, ctx.ring, ctx.kernel, ctx.settings = axis, ring, kernel, settings
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives()
        query, key, value, mask, out, logsumexp, *state = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        if mask is not None:
            gradient = gradient * _sees_any(mask, ctx.axis)
        gradients = ctx.ring.differentiate(
            ctx.axis.group,
            _on_each_part(kernel.differentiate, mask, ctx.axis, query.dtype),
            grad_out=gradient,
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            state=state,
            **ctx.settings,
        )
        return *gradients, None, None, None, None


def _on_each_part(
    operator: Callable[..., Any], mask: torch.Tensor | None, axis: Axis, dtype: torch.dtype
) -> Callable[..., Any]:
    """Return an operator that gets the mask of the keys of each rank, in the order in which they arrive."""
    if mask is None:
        return operator
    rows = _own_rows(mask, axis)
    sources = iter([(axis.rank - step) % axis.size for step in range(axis.size)])

    def operate(*tensors: Any, **options: Any) -> Any:
        source = next(sources)
        part = rows if rows.shape[-1] == 1 else part_of(rows, axis, source, dim=-1)
        return operator(*tensors, bias=_bias_of(part, dtype), **options)

    return operate


def _own_rows(mask: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the rows of a mask that are those of this rank's positions, with 4 dims."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask if mask.shape[-2] == 1 else part_of(mask, axis, axis.rank, dim=-2)


def _bias_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the finite bias of a mask, which is False for hidden scores, or a bias itself."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, _HIDDEN)
    return mask.to(dtype).clamp(min=_HIDDEN)


def _sees_any(mask: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return for each of this rank's positions whether the mask lets it see any; others attend to nothing."""
    rows = _own_rows(mask, axis)
    return (rows if rows.dtype == torch.bool else rows > _HIDDEN).any(-1, keepdim=True)
