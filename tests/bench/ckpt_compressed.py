"""Compressed checkpoints and published versions: their size as a share of the tensors' bytes.

Weights are drawn from a normal distribution, 64 MiB of each dtype. For the versions, AdamW updates an
fp32 copy of 8 MiB of bf16 weights with random gradients for `STEPS` steps. Only the last delta is measured,
because the first steps of AdamW are the largest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from harness import Table

from hocket.ckpt import list_checkpoints
from hocket.ckpt.torch import CheckpointStore, Publisher

__all__ = ["measure"]

NUM_BYTES = 64 << 20
STEPS = 40
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def measure(folder: Path) -> list[Table]:
    """Save and publish once; what is written is the same in every round."""
    ratio = Table("Size of a checkpoint", "of the tensors' bytes", [], is_less_better=True)
    deltas = Table("Size of a published bf16 delta", "of the tensors' bytes", [], is_less_better=True)
    root = folder / "compressed"
    for name, dtype in DTYPES.items():
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(NUM_BYTES // dtype.itemsize, generator=generator).mul_(0.02).to(dtype)
        for compression in ("zstd:3", "planes+zstd:3"):
            shutil.rmtree(root, ignore_errors=True)
            CheckpointStore(root, compression=compression).save({"w": weights}, step=0)
            ratio.add(compression, f"normal {name}", _bytes(root) / NUM_BYTES)
    for rate in (3e-6, 1e-6):
        shutil.rmtree(root, ignore_errors=True)
        _publish(root, rate)
        deltas.add("hocket", f"AdamW at {rate:g}", _bytes(root) / (NUM_BYTES // 8))
    shutil.rmtree(root, ignore_errors=True)
    return [ratio, deltas]


def _publish(root: Path, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUM_BYTES // 16, generator=generator).mul_(0.02).requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=rate, weight_decay=0.0)
    with Publisher(root, full_every=STEPS + 1) as publisher:
        for step in range(STEPS):
            master.grad = torch.randn(master.shape, generator=generator)
            optimizer.step()
            if step >= STEPS - 2:
                publisher.publish({"w": master.detach().bfloat16()}, step=step)


def _bytes(root: Path) -> int:
    return list_checkpoints(root)[-1].num_bytes or 0
