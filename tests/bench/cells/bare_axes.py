"""Bare loops over the recipe's GPT on two ranks, one for each axis, as torch's tutorials write them.

Each function takes the whole model and returns what this rank keeps of it and a function that runs forward
and backward on a batch. The loss of a batch is that of one process.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hocket.recipes.gpt import GPT, Block

Batch = dict[str, Tensor]
Backward = Callable[[Batch], object]
MICROBATCHES = 4


def tensor_parallel(model: GPT) -> tuple[nn.Module, Backward]:
    """Cut matrices; each rank's third of `qkv` holds queries, keys and values of its own heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "byte_embedding": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.qkv": ColwiseParallel(),
            "blocks.*.attention_out": RowwiseParallel(),
            "blocks.*.mlp_in": ColwiseParallel(),
            "blocks.*.mlp_out": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    return model, lambda batch: model.loss(model(batch), batch).backward()


def context_parallel(model: GPT) -> tuple[nn.Module, Backward]:
    """Cut sequences, and exchange positions for heads around attention (Ulysses, arXiv:2309.14509)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def exchange(x: Tensor, split: int, join: int) -> Tensor:
        parts = torch.stack(x.chunk(ranks, split))
        return torch.cat(all_to_all_single(torch.empty_like(parts), parts).unbind(), join)

    def attend(block: Block, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = block.qkv(x).view(batch, length, 3, -1, block.head_width).permute(2, 0, 3, 1, 4)
        q, k, v = exchange(heads, 2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = block.attention_out(exchange(mixed, 2, 1).transpose(1, 2).reshape(batch, length, -1))
        return out

    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        block.attend = types.MethodType(attend, block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)

    def loss_of(batch: Batch) -> Tensor:
        seen, targets = batch["tokens"][:, :-1].long(), batch["tokens"][:, 1:].long()
        length = seen.shape[1] // ranks
        own = slice(rank * length, (rank + 1) * length)
        x = model.byte_embedding(seen[:, own]) + model.position_embedding.weight[own]
        for block in model.blocks:
            x = block(x)
        logits = model.head(model.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, own].flatten(), reduction="sum")
        return loss / targets.numel()

    # `fully_shard` gathers the parameters beside the blocks for the model's own forward alone.
    model.forward = loss_of
    return model, lambda batch: model(batch).backward()


class _Half(nn.Module):
    """A stage of the GPT: its blocks, and the embeddings or the head."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.blocks = model.blocks[:half] if rank == 0 else model.blocks[half:]
        self.ends = (
            nn.ModuleList([model.byte_embedding, model.position_embedding])
            if rank == 0
            else nn.ModuleList([model.norm, model.head])
        )
        self.is_first = rank == 0

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.ends
        if self.is_first:
            x = first(x) + second.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else second(first(x))


def pipeline(model: GPT) -> tuple[nn.Module, Backward]:
    """Cut the blocks into two stages, which microbatches go through by the schedule 1F1B."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    half = _Half(model, rank)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    stage = PipelineStage(half, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def backward(batch: Batch) -> None:
        if rank == 0:
            schedule.step(batch["tokens"][:, :-1].long())
        else:
            schedule.step(target=batch["tokens"][:, 1:].long(), losses=[])

    return half, backward


AXES: dict[str, Callable[[GPT], tuple[nn.Module, Backward]]] = {
    "tp": tensor_parallel,
    "cp": context_parallel,
    "pp": pipeline,
}
