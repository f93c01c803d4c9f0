"""States of sharded models, for tests that save and load them; imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def stepped(net: torch.nn.Module) -> dict[str, Any]:
    """Return the states of a model and of its optimizer after a step, by parameter name."""
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {parameter: name for name, parameter in net.named_parameters()}
    slots = {names[parameter]: dict(slots) for parameter, slots in optimizer.state.items()}
    return {"model": net.state_dict(), "slots": slots}


def whole(node: Any) -> dict[str, torch.Tensor]:
    """Return a tree's full tensors by name; collective if some are DTensors."""
    if isinstance(node, dict):
        return {
            f"{key}.{rest}".rstrip("."): tensor
            for key, child in node.items()
            for rest, tensor in whole(child).items()
        }
    return {"": node.full_tensor() if isinstance(node, DTensor) else node}


def wrong(found: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ from the expected ones; collective like `whole`."""
    return [name for name, each in whole(found).items() if not torch.equal(each, expected[name])]
