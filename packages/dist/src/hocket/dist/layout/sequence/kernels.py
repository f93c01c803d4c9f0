"""The attention operators of each device that ring attention merges, under one calling convention.

Shapes: `B` sequences, `H` heads of queries, `K` heads of keys, a divisor of `H`, `L` queries, `S` keys, `D`
features. An operator also returns the logarithm of the sum of the exponentials of each query's scores, `(B,
H, L) float`, by which the results of several sets of keys are merged. A bias, `(B, H, L, S)`, is added to the
scores; it is finite, so that no sum is that of nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from hocket.dist.errors import ModelError

FEATURES = 8
"""The kernels of CUDA take a multiple of so many features."""
_ROWS = 32
"""The memory-efficient kernel stores the sums of a multiple of so many queries, infinite at the end."""

_COLUMNS = 16
"""It takes a bias whose rows begin at multiples of so many elements."""

_aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator of attention without dropout.

    Attributes:
        forward: Maps queries, keys, values, the bias or None, whether they are causal, and the scale to the
            output, the sums, and the tensors that `backward` takes as `state`.
        backward: Maps the gradient of the output, the tensors and results of `forward`, the state and the
            same settings to the gradients of queries, keys and values.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        is_causal: bool,
        scale: float,
    ) -> Tensors:
        """Return the output `(B, H, L, D)`, the sums `(B, H, L)`, and the state of the backward pass.

        Args:
            query: `(B, H, L, D)`.
            key: `(B, K, S, D)`.
            value: The same.
            bias: Expands to `(B, H, L, S)`.
            is_causal: Whether query `i` sees the keys up to `i`; then `L` is `S`.
            scale: The factor of the scores.
        """
        groups = query.shape[1] // key.shape[1]
        inputs = query.contiguous(), _repeat(key, groups), _repeat(value, groups)
        return self.forward(*inputs, _expand(bias, query, key), is_causal, scale)

    def differentiate(
        self,
        *,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        bias: torch.Tensor | None = None,
        is_causal: bool,
        scale: float,
        state: Sequence[torch.Tensor],
    ) -> Tensors:
        """Return the gradients of queries, keys and values; `out` and `logsumexp` are those of all keys."""
        groups = query.shape[1] // key.shape[1]
        inputs = query.contiguous(), _repeat(key, groups), _repeat(value, groups)
        results = grad_out.contiguous(), *inputs, out.contiguous(), logsumexp.contiguous()
        gradients = self.backward(*results, state, _expand(bias, query, key), is_causal, scale)
        return gradients[0], _add_up(gradients[1], groups), _add_up(gradients[2], groups)


def find_kernel(query: torch.Tensor, *, has_bias: bool) -> Kernel:
    """Return the operator for queries, and for keys and values like them.

    Raises:
        ModelError: There is none for their device and dtype.
    """
    if query.dtype in (torch.float32, torch.bfloat16, torch.float16):
        if query.device.type == "cpu":
            return CPU
        if query.device.type == "cuda":
            params = SDPAParams(query, query, query, None, 0.0, False, False)
            if not has_bias and can_use_flash_attention(params):
                return FLASH
            if can_use_efficient_attention(params):
                return EFFICIENT
    raise ModelError(
        f"attention has {str(query.dtype).removeprefix('torch.')} queries on {query.device.type}, and ring "
        "attention computes in float32, bfloat16 and float16 by the flash or memory-efficient attention of "
        "CUDA or the one of the CPU, where torch allows it. Set `precision='amp_bf16'`, or leave the method "
        "'ring' out"
    )


def _repeat(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat each head for the heads of queries that share it; contiguous."""
    return tensor.contiguous() if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _add_up(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Add up the gradients of repeated heads, in float32."""
    if groups == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, *rest).sum(2, dtype=torch.float32)


def _expand(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Expand a bias to all sequences and heads, without a copy of them, with rows that are aligned."""
    if bias is None:
        return None
    length = key.shape[2]
    bias = bias.expand(*bias.shape[:-1], length)
    aligned = F.pad(bias, (0, -length % _COLUMNS))[..., :length]
    return aligned.expand(*query.shape[:3], length)


def _cpu_forward(*inputs: Any) -> Tensors:
    *tensors, bias, is_causal, scale = inputs
    attend = _aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = attend(*tensors, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, logsumexp


def _cpu_backward(*inputs: Any) -> Tensors:
    *tensors, _state, bias, is_causal, scale = inputs
    differentiate = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: Tensors = differentiate(*tensors, 0.0, is_causal, attn_mask=bias, scale=scale)
    return gradients


def _flash_forward(*inputs: Any) -> Tensors:
    *tensors, _bias, is_causal, scale = inputs
    attend = _aten._scaled_dot_product_flash_attention
    out, logsumexp, _, _, _, _, seed, offset, _ = attend(*tensors, 0.0, is_causal, False, scale=scale)
    return out, logsumexp, seed, offset


def _flash_backward(*inputs: Any) -> Tensors:
    *tensors, state, _bias, is_causal, scale = inputs
    _, query, key, *_ = tensors
    lengths = None, None, query.shape[2], key.shape[2]  # all sequences have the same
    differentiate = _aten._scaled_dot_product_flash_attention_backward
    gradients: Tensors = differentiate(*tensors, *lengths, 0.0, is_causal, *state, scale=scale)
    return gradients


def _efficient_forward(*inputs: Any) -> Tensors:
    query, key, value, bias, is_causal, scale = inputs
    attend = _aten._scaled_dot_product_efficient_attention
    out, logsumexp, seed, offset = attend(query, key, value, bias, True, 0.0, is_causal, scale=scale)
    return out, logsumexp[..., : query.shape[2]], seed, offset


def _efficient_backward(*inputs: Any) -> Tensors:
    grad_out, query, key, value, out, logsumexp, state, bias, is_causal, scale = inputs
    sums = F.pad(logsumexp, (0, -query.shape[2] % _ROWS), value=torch.inf)
    needed = [True, True, True, False]
    differentiate = _aten._scaled_dot_product_efficient_attention_backward
    results = differentiate(
        grad_out, query, key, value, bias, out, sums, *state, 0.0, needed, is_causal, scale=scale
    )
    return tuple(results[:3])


CPU = Kernel(forward=_cpu_forward, backward=_cpu_backward)
FLASH = Kernel(forward=_flash_forward, backward=_flash_backward)
EFFICIENT = Kernel(forward=_efficient_forward, backward=_efficient_backward)
