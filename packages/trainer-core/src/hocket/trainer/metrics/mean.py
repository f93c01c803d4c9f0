"""A mean kept as two states of a torchmetrics metric: a sum and the number of its terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

OPTIONS = (
    "compute_on_cpu",
    "compute_with_cache",
    "dist_sync_fn",
    "dist_sync_on_step",
    "distributed_available_fn",
    "process_group",
    "sync_on_compute",
)
"""The options of `torchmetrics.Metric`, which every metric passes on."""


class SumMean(Metric):
    """A sum divided by the number of its terms, so that any split of the data gives the same mean.

    Subclasses add to `total` and `count` in `update`.

    Args:
        options: Options of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # In float64, since the counts of a large data set are not exact in float32.
        self.add_state("total", torch.zeros((), dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, *args: Any) -> None:
        """Add a batch to `total` and `count`."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        """Return the mean, a scalar."""
        return (self.total / self.count).float()
