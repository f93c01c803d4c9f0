"""A GPT over bytes with a mixture of experts in each block, in one file.

Shapes: `T` positions of all sequences, `D` the width of the model, `E` experts in a block, `K` of them for
each position.

A router gives each position to the `K` experts with the largest scores, however many positions an expert
gets. The load is balanced without a term in the loss: a bias of each expert, which counts in the choice and
not in the result, rises where it gets fewer positions than the mean (Wang et al. 2024); `ExpertBalance` moves
it. `aux_loss` adds the term of Fedus et al. (2021) to the loss instead, or as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.recipes.gpt import GPT, Block, GPTConfig
from hocket.trainer import Callback


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """The size of a `MixtureGPT`.

    Attributes:
        gpt: The size of all but the experts.
        num_experts: Experts in a block, `E`.
        num_chosen: Experts of a position, `K`.
        aux_loss: Weight of the term of the loss that balances the load; 0 for none.
    """

    gpt: GPTConfig = field(default_factory=GPTConfig)
    num_experts: int = 8
    num_chosen: int = 2
    aux_loss: float = 0.0

    def __post_init__(self) -> None:
        """Refuse more experts of a position than there are.

        Raises:
            ValueError: `num_chosen` is not between 1 and `num_experts`, or `aux_loss` is below 0.
        """
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(
                f"`num_chosen` is {self.num_chosen}, expected a number from 1 to `num_experts`, "
                f"{self.num_experts}"
            )
        if not self.aux_loss >= 0:
            raise ValueError(f"`aux_loss` is {self.aux_loss}, expected a weight of at least 0")


class Experts(nn.Module):
    """Two-layer perceptrons, stacked; the signature of `forward` is that of transformers' experts.

    Expert parallelism gives each rank some of them.
    """

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, 4 * width, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, 4 * width))

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of the experts of each row.

        Args:
            rows: `(T, D)`.
            experts: `(T, K) int64`.
            weights: `(T, K)`.
        """
        num_chosen = experts.shape[1]
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        chosen = rows[order // num_chosen]
        compute = self._compute_grouped if can_group(chosen, self.up, self.down) else self._compute_each
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        mixed = compute(chosen, counts)[back] * weights.flatten()[:, None]
        return mixed.view(len(rows), num_chosen, mixed.shape[1]).sum(1).to(rows.dtype)

    def _compute_grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of rows, in the order of their experts, by one product for each layer."""
        offsets = counts.cumsum(0).to(torch.int32)
        if torch.is_autocast_enabled(rows.device.type):  # which does not know this product
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, up, down = rows.to(dtype), self.up.to(dtype), self.down.to(dtype)
        else:
            up, down = self.up, self.down
        wide = F.gelu(F.grouped_mm(rows, up.mT, offs=offsets))
        results: Tensor = F.grouped_mm(wide, down.mT, offs=offsets)
        return results

    def _compute_each(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the same, by two products for each expert."""
        # Also an expert without rows computes, so that all ranks have gradients of the same parameters.
        return torch.cat(
            [
                F.linear(F.gelu(F.linear(part, self.up[index])), self.down[index])
                for index, part in enumerate(torch.split(rows, counts.tolist()))
            ]
        )


def can_group(rows: Tensor, *weights: Tensor) -> bool:
    """Return whether torch has one product of rows with several matrices, each with its own rows, for these.

    On CUDA that is for bf16 and GPUs from compute capability 8.0 on. On the CPU it is from torch 2.11 on:
    before, it fails for memory that does not begin at a multiple of 16 bytes. Compilers take it in bf16 only.

    Args:
        rows: `(T, D)`.
        weights: `(E, …, …)`.
    """
    kind = rows.device.type
    if kind not in ("cpu", "cuda"):  # on others, such as meta, torch may not even answer whether it casts
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    if kind == "cuda":
        is_known = dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    else:
        is_known = kind == "cpu" and dtype in (torch.float32, torch.bfloat16) and torch.__version__ >= "2.11"
    if not is_known or not len(rows) or not hasattr(F, "grouped_mm") or torch.compiler.is_compiling():
        return False
    is_aligned = all(
        size * dtype.itemsize % _ALIGNMENT == 0
        for one in weights
        for size in (*one.shape[1:], one.storage_offset())
    )
    return is_aligned and all(one.is_contiguous() for one in weights)


_ALIGNMENT = 16
"""Bytes of which rows of matrices are a multiple, and at a multiple of which they begin."""


class Mixture(nn.Module):
    """A router and its experts.

    Attributes:
        bias: What the choice of each expert adds to its score, `(E,)`; moved by `ExpertBalance`.
        counts: Positions of each expert since the last update, on this rank, `(E,)`.
        aux: The term of the loss of the last forward pass.
    """

    bias: Tensor
    counts: Tensor

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.num_chosen, self._aux_loss = config.num_chosen, config.aux_loss
        self.router = nn.Linear(config.gpt.width, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.gpt.width)
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("counts", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of the chosen experts, in the shape of `x`."""
        rows = x.flatten(0, -2)
        scores = self.router(rows).float().softmax(-1)
        chosen = (scores.detach() + self.bias).topk(self.num_chosen).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        # Activation checkpointing runs the forward pass again in backward, which is no other position.
        is_again = torch._C._current_graph_task_id() != -1
        if self.training and not is_again:
            with torch.no_grad():
                self.counts += torch.bincount(chosen.flatten(), minlength=len(self.bias))
        if self._aux_loss:
            share = torch.bincount(chosen.flatten(), minlength=len(self.bias)) / chosen.numel()
            aux = self._aux_loss * len(self.bias) * (share * scores.mean(0)).sum()
            if not is_again:  # it would keep the recomputed activations until the next batch
                self.aux = aux
        out: Tensor = self.experts(rows, chosen, weights).view_as(x)
        return out


class MixtureBlock(Block):
    """A block of the GPT with a mixture of experts in place of the perceptron."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config.gpt)
        del self.mlp_in, self.mlp_out
        self.mixture = Mixture(config)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attend(self.attention_norm(x))
        out: Tensor = x + self.mixture(self.mlp_norm(x))
        return out


class MixtureGPT(GPT):
    """A transformer that predicts the next byte, with a mixture of experts in each block.

    Batches and outputs are those of `GPT`.
    """

    def __init__(self, config: MixtureConfig | None = None) -> None:
        self.mixture_config = config or MixtureConfig()
        super().__init__(self.mixture_config.gpt)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy over the batch, in nats a byte, and the terms of the routers.

        Raises:
            ValueError: `aux_loss` is set, and the experts of some blocks are on other ranks, as under `pp`.
        """
        loss = super().loss(outputs, batch)
        mixtures = {name: one for name, one in self.named_modules() if isinstance(one, Mixture)}
        if self.mixture_config.aux_loss:
            for name, one in mixtures.items():
                if "up" not in one.experts._parameters:
                    raise ValueError(
                        f"`aux_loss` is {self.mixture_config.aux_loss}, and the experts of `{name}` are on "
                        "another stage of `pp`, which has the term of the loss. Set `aux_loss` to 0 and use "
                        "`ExpertBalance`, or leave `pp` out"
                    )
        terms = [one.aux for one in mixtures.values() if one.aux is not None]
        return loss + torch.stack(terms).sum() if terms and self.training else loss

    def _make_block(self) -> nn.Module:
        return MixtureBlock(self.mixture_config)

    def _init_weights(self, module: nn.Module) -> None:
        std = 0.02 / (2 * self.config.num_layers) ** 0.5
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Experts):
            torch.nn.init.normal_(module.up, std=0.02)
            torch.nn.init.normal_(module.down, std=std)
        if isinstance(module, Mixture):  # for a model that is built on the meta device
            torch.nn.init.zeros_(module.bias)
            torch.nn.init.zeros_(module.counts)
        if isinstance(module, MixtureBlock):
            torch.nn.init.normal_(module.attention_out.weight, std=std)


class ExpertBalance(Callback):
    """Moves the biases of experts towards an even load after each batch, and logs the positions of each.

    Logged as `experts/<module>/<expert>`: the positions of the batch, of all ranks.

    Args:
        rate: What a bias moves in a batch; 0 only logs.
    """

    reads_outputs = False

    def __init__(self, rate: float = 1e-3) -> None:
        if not rate >= 0:
            raise ValueError(f"`rate` is {rate}, expected a number of at least 0")
        self.rate = rate

    def batch_end(self, state: Any, logger: Any) -> None:
        """Add up the positions of all ranks, and move the biases. Collective."""
        mixtures = {name: one for name, one in state.model.named_modules() if isinstance(one, Mixture)}
        if not mixtures:
            return
        own = torch.stack([one.counts for one in mixtures.values()]).to("cpu", torch.float64)
        # Sums of whole numbers, so that every layout moves the biases alike. Ranks that share a sequence have
        # counted parts of it, and those of other stages have counted for other blocks.
        parallelism = state.parallelism
        reduce_async = getattr(parallelism, "reduce_all_async", parallelism.reduce_async)
        totals = cast("Tensor", reduce_async(own.flatten()).wait()).view_as(own)
        totals /= getattr(parallelism, "num_equal_inputs", 1)
        for (name, one), counts in zip(mixtures.items(), totals, strict=True):
            one.counts.zero_()
            one.bias += self.rate * (counts.mean() - counts).sign().to(one.bias)
            logger.log_metrics(
                {f"experts/{name}/{index}": count for index, count in enumerate(counts.tolist())}
            )
