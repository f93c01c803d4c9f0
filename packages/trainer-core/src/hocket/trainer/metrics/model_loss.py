"""The loss as a metric, for a model that defines no metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.trainer.metrics.mean import SumMean


class Loss(SumMean):
    """The mean loss over samples or tokens, weighted as in training."""

    higher_is_better = False

    def update(self, loss: Tensor, weight: Tensor | float) -> None:
        """Add a batch.

        Args:
            loss: The mean loss of the batch, a scalar.
            weight: The weight of the batch; a batch of weight 0 adds nothing, although its mean is NaN.
        """
        weight = torch.as_tensor(weight, dtype=self.total.dtype, device=self.total.device)
        self.add_sum(torch.where(weight > 0, loss * weight, 0.0), weight)

    def add_sum(self, total: Tensor, weight: Tensor | float) -> None:
        """Add a batch by the sum of its losses and their weight, for a model that returns a `LossSum`."""
        self.total += total
        self.count += weight
