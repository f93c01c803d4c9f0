"""The loss of a model that states no metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.trainer.metrics.mean import SumMean


class Loss(SumMean):
    """The mean loss over samples or tokens, as the training weighs it."""

    higher_is_better = False

    def update(self, loss: Tensor, weight: Tensor | float) -> None:
        """Add a batch.

        Args:
            loss: Its mean loss, a scalar.
            weight: What it weighs; a batch of weight 0 adds nothing, though its mean is not a number.
        """
        weight = torch.as_tensor(weight, dtype=self.total.dtype, device=self.total.device)
        self.add_sum(torch.where(weight > 0, loss * weight, 0.0), weight)

    def add_sum(self, total: Tensor, weight: Tensor | float) -> None:
        """Add a batch by the sum of its losses and their weight, where the model gives these."""
        self.total += total
        self.count += weight
