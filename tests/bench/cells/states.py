"""The states that cells save and load, and measurements of a cell's memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

State = dict[str, torch.Tensor]
SHAPES = ["model", "optimizer", "small"]
WARM_UP_BYTES = 3 << 30


def make_state(shape: str, fill: int = 1) -> State:
    """Make a state of random bytes.

    `model`: 164 bf16 tensors, 1.27 GB. `optimizer`: moments and step counts, 519 fp32 tensors, 1.34 GB.
    `small`: 20,000 fp32 tensors, 0.4 GB.
    """
    torch.manual_seed(fill)
    if shape == "small":
        return {f"layers.{i}.value": torch.randn(1024 + i % 64 * 128) for i in range(20_000)}
    if shape == "model":
        state = _transformer(2048, 11, torch.bfloat16)
    else:
        state = {}
        for name, value in _transformer(1024, 12, torch.float32).items():
            state[f"{name}.exp_avg"] = value
            state[f"{name}.exp_avg_sq"] = torch.empty_like(value)
            state[f"{name}.step"] = torch.empty((), dtype=torch.float32)
    for value in state.values():
        value.view(-1).view(torch.uint8).random_(0, 100)
    return state


def _transformer(width: int, num_norms: int, dtype: torch.dtype) -> State:
    state: State = {}
    for layer in range(9):
        for name in "qkvo":
            state[f"layers.{layer}.attention.{name}"] = torch.empty(width, width, dtype=dtype)
        for name, size in {
            "up": (4 * width, width),
            "gate": (4 * width, width),
            "down": (width, 4 * width),
        }.items():
            state[f"layers.{layer}.mlp.{name}"] = torch.empty(size, dtype=dtype)
        for name in map(str, range(num_norms)):
            state[f"layers.{layer}.norm.{name}"] = torch.empty(width, dtype=dtype)
    state["embedding"] = torch.empty(12_000, width, dtype=dtype)
    state["head"] = torch.empty(4_000, width, dtype=dtype)
    return state


def num_bytes(state: State) -> int:
    """Return the bytes of a state."""
    return sum(value.nbytes for value in state.values())


def warm_memory() -> None:
    """Touch memory and free it, because the first touch of a new page costs more than a copy into it."""
    torch.ones(WARM_UP_BYTES, dtype=torch.uint8)


def forget_peak() -> None:
    """Reset the peak of this process's resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """Return the peak of resident memory in KiB, including mapped pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def sync(folder: Path) -> None:
    """Flush every file below a folder to disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
