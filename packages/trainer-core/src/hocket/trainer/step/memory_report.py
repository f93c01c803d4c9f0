"""An account of a run's memory by use, with the setting to change next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.ranks.sharded_tensors import local_part

if TYPE_CHECKING:
    from hocket.trainer.state import State


def memory_by_use(state: State) -> dict[str, int]:
    """Return the bytes that this rank holds for each use, shared storages counted once."""
    seen: set[int] = set()
    parameters = list(state.model.parameters())
    return {
        "parameters": _bytes(parameters, seen),
        "buffers": _bytes(state.model.buffers(), seen),
        "gradients": _bytes([one.grad for one in parameters if one.grad is not None], seen),
        "optimizer state": _bytes(
            [value for one in state.optimizers for slots in one.state.values() for value in slots.values()],
            seen,
        ),
        "batch": _bytes(tensors(state.batch), seen),
        "outputs": _bytes(tensors(state.outputs), seen),
    }


def memory_report(state: State) -> str:
    """Return a few lines that list the memory of this rank by use and the settings to change, in order."""
    bytes_by_use = memory_by_use(state)
    lines = [f"memory of this rank on {state.device}, by use:"]
    lines += [f"  {name:<16} {_giga(number):>10}" for name, number in bytes_by_use.items()]
    if state.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(state.device)
        peak = torch.cuda.max_memory_allocated(state.device)
        counted = sum(bytes_by_use.values())
        lines += [
            f"  {'the rest':<16} {_giga(max(0, peak - counted)):>10}  (activations, workspaces; at the peak)",
            f"  peak {_giga(peak)}, free {_giga(free)} of {_giga(total)}",
        ]
    lines.append("to use less, in this order:")
    lines += [f"  - {advice}" for advice in _advice(state, bytes_by_use)]
    return "\n".join(lines)


def _advice(state: State, bytes_by_use: Mapping[str, int]) -> list[str]:
    advice = []
    size = state.device_train_microbatch_size
    if size != 1:
        shown_size = "the whole batch of a rank" if size is None else size
        advice.append(f"`device_train_microbatch_size` is {shown_size}: halve it; the update stays the same")
    if state.precision == "fp32":
        advice.append("`precision='amp_bf16'` halves activations")
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in state.model.parameters())
    if not is_sharded and state.parallelism.data_parallel[1] > 1:
        advice.append(
            "`fsdp_config={}` divides parameters, gradients and optimizer state by the number of ranks"
        )
    elif is_sharded:
        advice.append("`fsdp_config={'activation_checkpointing': True}` recomputes activations")
    static = bytes_by_use["parameters"] + bytes_by_use["gradients"] + bytes_by_use["optimizer state"]
    if bytes_by_use["optimizer state"] * 2 > static > 0:
        advice.append("most of what stays is optimizer state: an optimizer with less of it (SGD, Muon) helps")
    return advice or ["a smaller model, a larger device, or more ranks"]


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _giga(number: int) -> str:
    return f"{number / 1e9:.3f} GB"
