"""A small GPT over bytes, in one file.

Shapes: `B` sequences in a batch, `L` bytes in a sequence, `D` the width of the model, `V` = 256 byte values.

The model is a plain `torch.nn.Module`, pre-norm and without dropout or bias in its projections (Radford et
al. 2019; the residual scaling at initialisation is section 2.3 there). The trainer needs two methods of it:
`forward(batch)` and `loss(outputs, batch)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.algos.alibi import AlibiAttention, policy_registry

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The size of a `GPT`.

    Attributes:
        context: Bytes that the model sees at once, `L`.
        width: Width of the residual stream, `D`; a multiple of `num_heads`.
        num_layers: Transformer blocks.
        num_heads: Attention heads of a block.
    """

    context: int = 128
    width: int = 256
    num_layers: int = 6
    num_heads: int = 4

    def __post_init__(self) -> None:
        """Refuse a width that the heads cannot share.

        Raises:
            ValueError: `width` is no multiple of `num_heads`.
        """
        if self.width % self.num_heads:
            raise ValueError(
                f"`width` is {self.width}, which {self.num_heads} heads cannot share evenly: "
                f"choose a multiple of `num_heads`"
            )


class Block(nn.Module):
    """Attention over earlier positions, then a two-layer perceptron; each adds to `x`, `(B, L, D)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_width = config.width // config.num_heads
        self.is_causal = True
        self.alibi: AlibiAttention | None = None
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attend(self.attention_norm(x))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Compute self-attention, over earlier positions if `is_causal`."""
        # By the width of a head and the shape of the projection: with tensor parallelism a rank has a share
        # of the heads, and with sequence parallelism `x` is a part of the sequence.
        projected = self.qkv(x)
        batch, length, _ = projected.shape
        q, k, v = projected.view(batch, length, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        attend = F.scaled_dot_product_attention if self.alibi is None else self.alibi
        mixed = attend(q, k, v, is_causal=self.is_causal)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


@policy_registry.register(Block)
def give_alibi(block: Block, index: int, max_sequence_length: int) -> nn.Module:  # noqa: ARG001
    """Give a block attention with linear biases; `hocket.algos.Alibi` calls it."""
    block.alibi = AlibiAttention(block.num_heads, max_sequence_length)
    return block


class GPT(nn.Module):
    """A transformer that predicts the next byte.

    A batch holds `tokens`, `(B, L + 1) uint8`: the first `L` are the input, the last `L` are predicted.
    """

    tp_plan: ClassVar[Mapping[str, str]] = {
        "byte_embedding": "embedding_rowwise",
        "blocks.*.qkv": "packed_colwise:3",
        "blocks.*.attention_out": "rowwise",
        "blocks.*.mlp_in": "colwise",
        "blocks.*.mlp_out": "rowwise",
        "head": "colwise_gather_output",
    }
    """The modules that tensor parallelism cuts, and how."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.byte_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(self._make_block() for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(self._init_weights)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the next byte at each position, `(B, L, V)`."""
        return self.logits(batch["tokens"][:, :-1].long())

    def logits(self, seen: Tensor) -> Tensor:
        """Return the logits at each position of `(B, L) int64`."""
        logits: Tensor = self.head(self.encode(seen))
        return logits

    def encode(self, seen: Tensor) -> Tensor:
        """Return the last features, `(B, L, D)`, at each position of `(B, L) int64`."""
        x = self.byte_embedding(seen) + self.position_embedding.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x)
        return features

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy over the batch, in nats a byte."""
        targets = batch["tokens"][:, 1:].long()
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def _make_block(self) -> nn.Module:
        return Block(self.config)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # Each block adds twice to the residual stream; this keeps its variance from growing with depth.
            for projection in (module.attention_out, module.mlp_out):
                torch.nn.init.normal_(projection.weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)
