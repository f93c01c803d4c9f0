"""`SingleProcess`: the parallelism of a run that is one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


class DoneWork:
    """A finished all-reduce of one process."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        """Return the values, without waiting."""
        return self._values


class SingleProcess:
    """The parallelism of one process on one device, without communication.

    Args:
        device: The device of the model.
    """

    data_parallel: tuple[int, int] = (0, 1)
    global_rank: int = 0
    world_size: int = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Move the model to the device; its parameters stay the objects that the optimizers hold."""
        return model.to(self.device)

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Do nothing: there are no other ranks."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of `max_norm`; return the norm before, `()` float."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce_async(self, values: torch.Tensor) -> DoneWork:
        """Return `values`, which are the sum over one process."""
        return DoneWork(values)

    def close(self) -> None:
        """Do nothing: there is no process group."""

    def describe(self) -> str:
        """Return the layout in one line."""
        return f"one process on {self.device}"
