"""`LossParts`: the named parts of a loss, averaged as the total is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.trainer.protocols import Parallelism, Work
from hocket.trainer.ranks.single_process import DoneWork

TINY = 1e-30  # avoids a division by zero for a batch without weight, whose sums are zero


class LossParts:
    """The sums of the parts of a batch's loss over its microbatches, on the device and without reading it.

    If the model's `loss` returns a dict, its parts are logged as `loss/train/<name>`.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """The weighted sum of each part so far."""
        self.is_used = False
        """Whether a loss that may have parts was added since the last `clear`."""
        self._weight: torch.Tensor | None = None
        """The sum of the weights so far, if they are known only on the device."""

    def add(self, loss: Any, weight: float | torch.Tensor) -> None:
        """Add a microbatch's parts; a loss that is not a dict, and parts that are not scalars, are left out.

        Args:
            loss: The return value of the model's `loss`.
            weight: The microbatch's loss weight.
        """
        if not isinstance(loss, Mapping):
            return
        self.is_used = True
        for name, part in loss.items():
            if name != "total" and isinstance(part, torch.Tensor) and part.numel() == 1:
                scaled = _weighted(part.detach().reshape(()).float(), weight)
                before = self.sums.get(name)
                self.sums[name] = scaled if before is None else before + scaled
        if isinstance(weight, torch.Tensor):
            self._weight = weight if self._weight is None else self._weight + weight

    def clear(self) -> None:
        """Clear the sums, as before another computation of the gradients."""
        self.is_used = False
        if self.sums:
            self.sums = {}
        self._weight = None

    def take(self, total_weight: float, parallelism: Parallelism) -> dict[str, Work]:
        """Return the mean of each part over the global batch, as handles, and clear the sums.

        Collective if there are parts; every rank then has the same ones.

        Args:
            total_weight: The loss weight of the global batch; not used where weights are known only on the
                device.
            parallelism: Sums over the ranks.
        """
        sums, weight = self.sums, self._weight
        self.clear()
        if not sums or not total_weight:
            return {}
        if weight is None:
            numbers = torch.stack(list(sums.values())) / total_weight
        else:
            numbers = torch.stack([*sums.values(), weight.float()])
        work: Work = DoneWork(numbers)
        if parallelism.data_parallel[1] > 1:
            work = parallelism.reduce_async(numbers.double() if numbers.device.type == "cpu" else numbers)
        has_weight = weight is not None
        return {f"loss/train/{name}": _PartMean(work, index, has_weight) for index, name in enumerate(sums)}


class _PartMean:
    """One number of a reduction, divided by the last one if that is the weight."""

    def __init__(self, work: Work, index: int, has_weight: bool) -> None:
        self._work = work
        self._index = index
        self._has_weight = has_weight

    def wait(self) -> torch.Tensor:
        """Wait for the sum, and return the number."""
        numbers = self._work.wait()
        number = numbers[self._index]
        return number / numbers[-1].clamp(min=TINY) if self._has_weight else number


def _weighted(part: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """Return a part times its weight; 0 without weight, where the mean over nothing is NaN."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, part, 0.0) * weight
    return part * weight if weight else torch.zeros_like(part)
