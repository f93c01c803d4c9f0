"""Metrics of segmentation, from the pixels of each class over the whole data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from hocket.trainer.checks import check_arguments
from hocket.trainer.metrics.logits import logits_of
from hocket.trainer.metrics.mean import OPTIONS


class _ClassOverlap(Metric):
    """The number of pixels of each class that are predicted, that are targets, and that are both.

    Args:
        num_classes: C.
        ignore_index: Targets with this index do not count.
        options: Options of `torchmetrics.Metric`.

    Raises:
        ValueError: If there are fewer than 2 classes.
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    predicted: Tensor
    targeted: Tensor
    both: Tensor

    def __init__(self, num_classes: int, ignore_index: int = -1, **options: Any) -> None:
        super().__init__(**options)
        if num_classes < 2:
            raise ValueError(f"`num_classes` is {num_classes}; expected at least 2")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        for name in ("predicted", "targeted", "both"):
            self.add_state(
                name, torch.zeros(num_classes, dtype=torch.int64, device="cpu"), dist_reduce_fx="sum"
            )

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Logits `(N, C, H, W)`, or a mapping with `logits`.
            targets: Class indices `(N, H, W)`.
        """
        predictions = logits_of(outputs).argmax(dim=1).reshape(-1)
        flat = targets.reshape(-1).long()
        is_counted = (flat != self.ignore_index).long()
        classes = flat.clamp(0, self.num_classes - 1)
        # Adding at indices, unlike `bincount`, does not read the device.
        self.predicted.scatter_add_(0, predictions, is_counted)
        self.targeted.scatter_add_(0, classes, is_counted)
        self.both.scatter_add_(0, classes, is_counted * (predictions == classes))


class MIoU(_ClassOverlap):
    """The mean intersection over union in percent, over the classes that occur."""

    def compute(self) -> Tensor:
        """Return the mean, a scalar double from 0 to 100."""
        union = self.predicted + self.targeted - self.both
        share = _exact(self.both) / union.clamp(min=1)
        return 100 * share.sum() / (union > 0).sum()


class Dice(_ClassOverlap):
    """The mean Dice coefficient in percent, over the classes that occur, except class 0, the background."""

    def compute(self) -> Tensor:
        """Return the mean, a scalar double from 0 to 100."""
        sizes = (self.predicted + self.targeted)[1:]
        share = 2 * _exact(self.both[1:]) / sizes.clamp(min=1)
        return 100 * share.sum() / (sizes > 0).sum().clamp(min=1)


def _exact(counts: Tensor) -> Tensor:
    """Return counts as doubles, which are exact; as floats on a device without doubles."""
    return counts.float() if counts.device.type == "mps" else counts.double()


check_arguments([Dice, MIoU], passed_on=OPTIONS)
