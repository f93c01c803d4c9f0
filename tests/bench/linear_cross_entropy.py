"""Memory and time of the loss of a language model's output layer: Hocket's chunks, torch's, stored logits.

Each cell runs in a process of its own, because the peak of a process's memory never falls. Run it with
`uv run python tests/bench/linear_cross_entropy.py`; on a machine with a GPU it measures the GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from harness import Table, run_cell
from torch.nn import functional as F

from hocket.trainer.loss import linear_cross_entropy


def stored(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute torch's loss from stored logits."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def torchs(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute torch's own chunked loss, which exists from torch 2.15 on."""
    return F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions())


LOSSES = {"hocket": linear_cross_entropy, "torch, stored logits": stored, "torch, chunked": torchs}


def cell(system: str, tokens: int, width: int, classes: int, dtype: torch.dtype, steps: int) -> None:
    """Run forward and backward passes, and print peak memory above the inputs and the median time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, width, device=device, dtype=dtype) * 0.02).requires_grad_()
    target = torch.randint(0, classes, (tokens,), device=device)
    # A small first call starts threads and loads kernels, which are not measured.
    LOSSES[system](x[:8], weight[:64], target[:8] % 64).backward()
    x.grad = weight.grad = None
    before = peak(device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = LOSSES[system](x, weight, target)
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        x.grad = weight.grad = None
    seconds.sort()
    print(json.dumps({"mib": (peak(device) - before) / 2**20, "seconds": seconds[len(seconds) // 2]}))


def peak(device: str) -> int:
    """Return the peak memory of this process in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure all cells, interleaved, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", choices=LOSSES)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--classes", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = (options.tokens, options.width)
    if options.cell:
        cell(options.cell, *shape, options.classes[0], getattr(torch, options.dtype), options.steps)
        return
    title = f"{shape[0]} tokens of width {shape[1]} in {options.dtype}, forward and backward"
    memory = Table(f"peak memory above the inputs, {title}", "MiB", is_less_better=True)
    seconds = Table(f"time, {title}", "s", is_less_better=True)
    systems = [name for name in LOSSES if name != "torch, chunked" or hasattr(F, "linear_cross_entropy")]
    for _ in range(options.rounds):
        for classes in options.classes:
            for system in systems:
                arguments = ["--cell", system, "--classes", str(classes), "--tokens", str(shape[0])]
                arguments += [
                    "--width",
                    str(shape[1]),
                    "--dtype",
                    options.dtype,
                    "--steps",
                    str(options.steps),
                ]
                figures = run_cell(Path(__file__), None, *arguments)
                memory.add(system, f"{classes} classes", figures["mib"])
                seconds.add(system, f"{classes} classes", figures["seconds"])
    memory.show()
    seconds.show()


if __name__ == "__main__":
    main()
