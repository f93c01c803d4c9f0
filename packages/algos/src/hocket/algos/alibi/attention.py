"""Attention with ALiBi over torch's scaled-dot-product and flex kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hocket.algos.alibi.bias import alibi_bias, alibi_slopes
from hocket.algos.checks import check_choice, check_count
from hocket.algos.errors import IncompatibleError

KERNELS = ("sdpa", "flex")


class AlibiAttention(nn.Module):
    """Scaled-dot-product attention with ALiBi, called like `F.scaled_dot_product_attention`.

    The distance of two tokens is counted in both directions, so that bidirectional models work, too; the
    paper defines ALiBi for causal ones. The module has no parameters and no entry in a state dict.

    Args:
        num_heads: Attention heads, `H`.
        max_sequence_length: The longest sequence; a longer one is refused.
        kernel: `"sdpa"` adds the bias to the mask, `(H, Q, K)` in the queries' dtype. `"flex"` computes it
            inside the kernel in fp32 and needs no memory for it; torch trains with it on CUDA alone.

    Raises:
        AlgorithmConfigError: A setting is out of its range.
    """

    slope_bits: torch.Tensor

    def __init__(self, num_heads: int, max_sequence_length: int, *, kernel: str = "sdpa") -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_count("max_sequence_length", max_sequence_length)
        check_choice("kernel", kernel, KERNELS)
        self.num_heads = num_heads
        self.max_sequence_length = max_sequence_length
        self.kernel = kernel
        # As integers, since `model.bfloat16()` would round a buffer of floats.
        self.register_buffer("slope_bits", alibi_slopes(num_heads).view(torch.int32), persistent=False)

    @property
    def slopes(self) -> torch.Tensor:
        """The slope of each head, `(H,) float32`, for any dtype of the model."""
        return self.slope_bits.view(torch.float32)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | BlockMask | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend, `(B, H, Q, D)` to `(B, H, Q, D)`; the queries are the last `Q` of `K` positions.

        Args:
            query: `(B, H, Q, D)`.
            key: `(B, H, K, D)`.
            value: `(B, H, K, D)`.
            attn_mask: Added to the scores, or bool and True where a query may see a key; for `"flex"` a
                `BlockMask`.
            dropout_p: Dropout of attention weights; 0 for `"flex"`, which has none.
            is_causal: Whether a query sees no later key.
            scale: Factor of the scores; `1 / sqrt(D)` if None.

        Raises:
            IncompatibleError: A sequence is too long, the number of heads differs, or the kernel does not
                support an argument.
        """
        self._check(query, key)
        if self.kernel == "flex":
            return self._flex(query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale)
        if isinstance(attn_mask, BlockMask):
            raise IncompatibleError(
                "`AlibiAttention` got a `BlockMask`, which belongs to `kernel='flex'`; 'sdpa' takes a tensor"
            )
        bias = _bias(self.slopes, query, key.shape[2], is_causal=is_causal)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            bias = bias + attn_mask.to(bias.dtype)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
        )

    def _check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if query.shape[1] != self.num_heads:
            raise IncompatibleError(
                f"`AlibiAttention` was made for {self.num_heads} heads and got queries of shape "
                f"{tuple(query.shape)}, expected (B, {self.num_heads}, L, D)"
            )
        if key.shape[2] > self.max_sequence_length:
            raise IncompatibleError(
                f"`Alibi`: a sequence has {key.shape[2]} tokens, and `max_sequence_length` is "
                f"{self.max_sequence_length}. Raise it, or cut the sequences"
            )

    def _flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | BlockMask | None,
        dropout_p: float,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        if dropout_p:
            raise IncompatibleError(
                f"`Alibi`: flex attention has no dropout, and this attention has {dropout_p}. Set the "
                "model's attention dropout to 0, or use `kernel='sdpa'`"
            )
        if isinstance(mask, torch.Tensor):
            raise IncompatibleError(
                "`Alibi`: flex attention takes a `BlockMask`, and this attention has a mask tensor. Use "
                "`kernel='sdpa'`"
            )
        if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
            raise IncompatibleError(
                "`Alibi`: torch's flex attention has no backward pass on a CPU. Use `kernel='sdpa'` there"
            )
        slopes, offset = self.slopes, key.shape[2] - query.shape[2]

        def add_bias(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:  # noqa: ARG001
            return score - slopes[head] * (row + offset - column).abs()

        if mask is None and is_causal:

            def see(batch: Any, head: Any, row: Any, column: Any) -> Any:  # noqa: ARG001 - torch's form
                return row + offset >= column

            mask = create_block_mask(see, None, None, query.shape[2], key.shape[2], device=str(query.device))
        attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex(query.device.type)
        out: torch.Tensor = attend(query, key, value, score_mod=add_bias, block_mask=mask, scale=scale)
        return out


_compiled: dict[str, Any] = {}
_last_bias: tuple[Any, torch.Tensor] | None = None


def _compiled_flex(device_type: str) -> Any:
    """Return flex attention compiled for a kind of device: fused on accelerators, plain torch on a CPU."""
    if device_type not in _compiled:
        backend = "aot_eager" if device_type == "cpu" else "inductor"
        _compiled[device_type] = torch.compile(flex_attention, backend=backend)
    return _compiled[device_type]


def _bias(slopes: torch.Tensor, query: torch.Tensor, key_length: int, *, is_causal: bool) -> torch.Tensor:
    """Return the bias in the queries' dtype, `(H, Q, K)`; the layers of a model share one tensor."""
    global _last_bias
    if torch.compiler.is_compiling():
        # The compiler shares equal computations of the layers; reading the mode would break the graph.
        return _make_bias(slopes, query, key_length, is_causal=is_causal)
    cache_key = (
        len(slopes), query.shape[2], key_length, query.device, query.dtype, is_causal,
        torch.is_inference_mode_enabled(),
    )  # fmt: skip
    if _last_bias is None or _last_bias[0] != cache_key:
        _last_bias = (cache_key, _make_bias(slopes, query, key_length, is_causal=is_causal))
    return _last_bias[1]


def _make_bias(
    slopes: torch.Tensor, query: torch.Tensor, key_length: int, *, is_causal: bool
) -> torch.Tensor:
    bias = alibi_bias(slopes, query.shape[2], key_length)
    if is_causal:
        later = torch.ones(bias.shape[1:], dtype=torch.bool, device=bias.device)
        bias = bias.masked_fill(later.triu(key_length - query.shape[2] + 1), float("-inf"))
    return bias.to(query.dtype)
