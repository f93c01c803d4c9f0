"""The time of an optimizer's step: Hocket's decoupled optimizers against torch's, and Muon with AdamW.

All systems step in turn, round by round, on equal parameters and gradients of a small transformer. Run it
with `uv run python tests/bench/optim.py`; on a machine with a GPU it measures the GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from harness import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hocket.trainer.optim import DecoupledAdamW, DecoupledSGDW, muon_with_adamw

Make = Callable[[nn.Module], list[Optimizer]]

ADAMW: dict[str, Make] = {
    "hocket": lambda m: [DecoupledAdamW(m.parameters(), 1e-3)],
    "hocket, foreach": lambda m: [DecoupledAdamW(m.parameters(), 1e-3, foreach=True)],
    "torch AdamW": lambda m: [AdamW(m.parameters(), 1e-3)],
    "torch AdamW, foreach": lambda m: [AdamW(m.parameters(), 1e-3, foreach=True)],
    "torch AdamW, fused": lambda m: [AdamW(m.parameters(), 1e-3, fused=True)],
    "Muon with AdamW": lambda m: muon_with_adamw(m, 1e-3),
}
SGDW: dict[str, Make] = {
    "hocket": lambda m: [DecoupledSGDW(m.parameters(), 1e-3, 0.9, weight_decay=1e-5)],
    "hocket, foreach": lambda m: [DecoupledSGDW(m.parameters(), 1e-3, 0.9, weight_decay=1e-5, foreach=True)],
    "torch SGD": lambda m: [SGD(m.parameters(), 1e-3, 0.9, weight_decay=1e-5)],
    "torch SGD, foreach": lambda m: [SGD(m.parameters(), 1e-3, 0.9, weight_decay=1e-5, foreach=True)],
    "torch SGD, fused": lambda m: [SGD(m.parameters(), 1e-3, 0.9, weight_decay=1e-5, fused=True)],
}


def make(width: int, device: str) -> nn.Module:
    """Return a transformer of 6 layers with gradients."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.ModuleDict(
        {
            "wte": nn.Embedding(1000, width),
            "blocks": nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
            "lm_head": nn.Linear(width, 1000, bias=False),
        }
    ).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def main() -> None:
    """Measure and print a table for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = []
    for kind, systems in (("AdamW", ADAMW), ("SGD with momentum", SGDW)):
        table = Table(f"step of {kind} on {device}", "ms", limits=("Muon with AdamW",), is_less_better=True)
        for width in options.width:
            made = {name: build(make(width, device)) for name, build in systems.items()}
            size = sum(p.numel() for group in made["hocket"][0].param_groups for p in group["params"])
            for number in range(options.rounds + 2):
                for name, optimizers in made.items():
                    start = time.perf_counter()
                    for optimizer in optimizers:
                        optimizer.step()
                    if device == "cuda":
                        torch.cuda.synchronize()
                    if number > 1:  # the first rounds create the state and load kernels
                        table.add(name, f"{size:,} parameters", (time.perf_counter() - start) * 1e3)
        tables.append(table)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds")
    for table in tables:
        table.show()


if __name__ == "__main__":
    main()
