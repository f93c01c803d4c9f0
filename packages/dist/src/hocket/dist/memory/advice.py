"""The note that is added to an out-of-memory error: what to try, and which processes hold memory."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.memory.estimate import estimate_memory, ladder
from hocket.dist.ranks.mesh import MeshShape

_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_MESSAGE in str(error)


def explain_out_of_memory(
    model: nn.Module, config: FSDPConfig, shape: MeshShape, device: torch.device
) -> str:
    """Return the levers in the order in which to try them, with the saving estimated for this model.

    Args:
        model: Laid out or plain; only its global shapes are used.
        config: The present layout.
        shape: The present mesh.
        device: The device that ran out.
    """
    static = estimate_memory(model, config, shape)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_of_process()
    activations = max(peak - static.total, 0)
    first = (
        f"memory of this rank: about {_size(static.total)} for parameters, gradients and optimizer state, "
        f"{_size(activations)} for activations and the rest (peak {_size(peak)}). Try in this order:"
    )
    lines = [first]
    levers = ladder(model, config, shape, activations=activations)
    lines += [
        f"  {index}. {name}: saves about {_size(saved)}" for index, (name, saved) in enumerate(levers, 1)
    ]
    others = list(_other_processes(device))
    if others:
        lines.append("Other processes that hold memory here: " + "; ".join(others))
    return "\n".join(lines)


def _other_processes(device: torch.device) -> Iterator[str]:
    """Describe the largest other processes on the device."""
    if device.type == "cuda":
        try:
            listed = torch.cuda.list_gpu_processes(device)
        except (RuntimeError, ModuleNotFoundError):
            return
        for line in listed.splitlines():
            if line.startswith("process") and f"{os.getpid()} uses" not in line:
                yield " ".join(line.split())
        return
    sizes = []
    for folder in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                pages = int((folder / "statm").read_text().split()[1])
                sizes.append(
                    (
                        pages * os.sysconf("SC_PAGE_SIZE"),
                        int(folder.name),
                        (folder / "comm").read_text().strip(),
                    )
                )
            except (OSError, IndexError, ValueError):
                continue
    for size, pid, name in sorted(sizes, reverse=True)[:5]:
        yield f"{name} (pid {pid}) {_size(size)}"


def _peak_of_process() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
