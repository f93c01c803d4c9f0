"""Published weights: the rates at which versions are written and applied, in bytes of the tensors.

256 MiB of bf16 weights, of which each step changes the lowest bit of `SHARE`. One process publishes and
follows, in a folder; files stay in the page cache. `python tests/bench/ckpt_weights.py FOLDER` runs it alone
and prints the load of the machine, too.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Table

from hocket.ckpt import FolderFollower, Follower
from hocket.ckpt.torch import Publisher, TensorFollower

__all__ = ["measure"]

NUM_BYTES = 256 << 20
SHARE = 0.02
STEPS = 3


def measure(folder: Path) -> list[Table]:
    """Publish a whole version and some deltas, and apply each by every follower."""
    rates = Table("Published bf16 weights", "GB/s of the tensors' bytes", [])
    root = folder / "weights"
    shutil.rmtree(root, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"w{number}": torch.randn(NUM_BYTES // 32, generator=generator).mul_(0.02).bfloat16()
        for number in range(16)
    }
    into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    followers = {
        "NumPy": Follower(root / "versions"),
        "tensors in place": TensorFollower(root / "versions", into),
        "a folder": FolderFollower(root / "versions", root / "served"),
    }

    def add(column: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        rates.add("hocket", column, NUM_BYTES / (time.perf_counter() - began) / 1e9)

    with Publisher(root / "versions", full_every=3 * STEPS + 1) as publisher:
        for step in range(2 * STEPS + 1):
            kind = "whole" if step == 0 else "delta"
            mode = "sync" if step <= STEPS else "async"
            stall = "" if mode == "sync" else ": time until an asynchronous call returns"
            add(f"publish {kind}{stall}", lambda: publisher.publish(weights, step=step, mode=mode))  # noqa: B023
            publisher.wait()
            for name, follower in followers.items():
                add(f"apply {kind} to {name}", follower.update)
            for tensor in weights.values():
                chosen = torch.rand(tensor.numel(), generator=generator) < SHARE
                tensor.view(torch.int16)[chosen] ^= 1
    shutil.rmtree(root)
    return [rates]


if __name__ == "__main__":
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    for table in measure(Path(sys.argv[1])):
        table.show()
