"""Attention over sequences that are cut: each rank gets all positions of its share of the heads (Ulysses).

Before attention, ranks exchange their positions of all heads for all positions of some heads, and after it
the other way round. Each rank attends over whole sequences, so that causal masks give all ranks equal work.
"""

from typing import Any

import torch
import torch.nn.functional as F

from hocket.dist.config.context_parallel import RING_ADVICE
from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.attention import SequenceAttention
from hocket.dist.layout.sequence.exchange import exchange


class UlyssesAttention(SequenceAttention):
    """The mode in which `scaled_dot_product_attention` takes cut sequences.

    Masks are those of whole sequences, for all heads together or for each.

    Args:
        axis: The ranks that share a sequence.
        blocks: The name of the blocks, for messages.
    """

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
        self._check(query, key, attn_mask)
        if key.shape == value.shape and query.shape[-1] == key.shape[-1] and query.dtype == key.dtype:
            parts = [self._by_rank(tensor) for tensor in (query, key, value)]
            heads = [part.shape[2] for part in parts]
            query, key, value = torch.split(self._to_sequences(torch.cat(parts, dim=2)), heads, dim=1)
        else:
            query, key, value = (self._to_sequences(self._by_rank(tensor)) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.narrow(1, self._axis.rank * query.shape[1], query.shape[1])
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
        return self._to_heads(attended)

    def _by_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn (batch, heads, positions here, features) into (batch, ranks, heads of each, …)."""
        batch, heads, *rest = tensor.shape
        return tensor.reshape(batch, self._axis.size, heads // self._axis.size, *rest)

    def _to_sequences(self, parts: torch.Tensor) -> torch.Tensor:
        """Turn (batch, ranks, heads of each, positions here, features) into all positions of own heads."""
        sent = parts.movedim(1, 0).contiguous()
        return exchange(sent, None, None, self._axis.group).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _to_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """Turn (batch, own heads, positions, features) into own positions of all heads."""
        batch, heads, length, features = attended.shape
        size = self._axis.size
        parts = attended.reshape(batch, heads, size, length // size, features)
        sent = parts.movedim(2, 0).contiguous()
        return exchange(sent, None, None, self._axis.group).movedim(0, 1).flatten(1, 2)

    def _check(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> None:
        size, axis = self._axis.size, self._axis.name
        self._check_positions(query, key)
        for name, heads in (("heads", query.shape[1]), ("heads of keys", key.shape[1])):
            if heads % size:
                raise ModelError(
                    f"attention has {heads} {name} on each rank, which {size} ranks of `{axis}` cannot share "
                    f"evenly. Choose a degree that divides {heads}, or {RING_ADVICE}"
                )
        if mask is not None:
            self._check_mask(mask, query.shape[2] * size)
