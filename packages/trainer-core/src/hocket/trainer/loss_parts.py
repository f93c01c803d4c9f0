"""`LossParts`: the named parts of a loss, averaged as the total is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.trainer.parallelism import DoneWork
from hocket.trainer.protocols import Parallelism, Work


class LossParts:
    """The sums of the parts of a batch's loss over its microbatches, on the device and without reading it.

    If the model's `loss` returns a dict, its parts are logged as `loss/train/<name>`.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """The weighted sum of each part so far."""

    def add(self, loss: Any, weight: float | torch.Tensor) -> None:
        """Add a microbatch's parts; a loss that is not a dict, and parts that are not scalars, are left out.

        Args:
            loss: The return value of the model's `loss`.
            weight: The microbatch's loss weight.
        """
        if not isinstance(loss, Mapping):
            return
        for name, part in loss.items():
            if name != "total" and isinstance(part, torch.Tensor) and part.numel() == 1:
                scaled = part.detach().reshape(()).float() * weight
                before = self.sums.get(name)
                self.sums[name] = scaled if before is None else before + scaled

    def clear(self) -> None:
        """Clear the sums, as before another computation of the gradients."""
        if self.sums:
            self.sums = {}

    def take(self, total_weight: float, parallelism: Parallelism) -> dict[str, Work]:
        """Return the mean of each part over the global batch, as handles, and clear the sums.

        Collective if there are parts; every rank then has the same ones.

        Args:
            total_weight: The loss weight of the global batch.
            parallelism: Sums over the ranks.
        """
        sums, self.sums = self.sums, {}
        if not sums or not total_weight:
            return {}
        means = torch.stack(list(sums.values())) / total_weight
        if parallelism.data_parallel[1] == 1:
            return {f"loss/train/{name}": DoneWork(mean) for name, mean in zip(sums, means, strict=True)}
        work = parallelism.reduce_async(means.double() if means.device.type == "cpu" else means)
        return {f"loss/train/{name}": _Item(work, index) for index, name in enumerate(sums)}


class _Item:
    """One number of a reduction."""

    def __init__(self, work: Work, index: int) -> None:
        self._work = work
        self._index = index

    def wait(self) -> torch.Tensor:
        """Wait for the sum, and return the number."""
        return self._work.wait()[self._index]
