"""`SingleProcess`: the parallelism of a run that is one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


class DoneWork:
    """A reduction that had nothing to wait for."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        """The values, at once."""
        return self._values


class SingleProcess:
    """One process, one device: the model is moved there, and nothing is reduced.

    Args:
        device: Where the model goes.
    """

    data_parallel: tuple[int, int] = (0, 1)
    global_rank: int = 0
    world_size: int = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Move the model; its parameters stay the objects that the optimizers hold."""
        return model.to(self.device)

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Do nothing: there is nobody to share gradients with."""

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm of `max_norm`; return the norm before, `()` float."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def reduce_async(self, values: torch.Tensor) -> DoneWork:
        """Return `values`: they are the sum already."""
        return DoneWork(values)

    def close(self) -> None:
        """Do nothing: there is no process group."""

    def describe(self) -> str:
        """Say the layout in one line."""
        return f"one process on {self.device}"
