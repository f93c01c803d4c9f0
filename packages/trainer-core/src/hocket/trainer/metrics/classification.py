"""Metrics of classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchmetrics import classification as tm

from hocket.trainer.checks import check_arguments
from hocket.trainer.loss import soft_cross_entropy
from hocket.trainer.loss.cross_entropy import is_dense
from hocket.trainer.loss.ignored_label import is_counted
from hocket.trainer.metrics.logits import class_dim, logits_of
from hocket.trainer.metrics.mean import OPTIONS, SumMean


class CrossEntropy(SumMean):
    """The cross-entropy, averaged over the targets that are not ignored.

    Args:
        ignore_index: Targets with this index do not count.
        options: Options of `torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(**options)
        self.ignore_index = ignore_index

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Logits `(N, C, ...)` or `(N, ..., C)`, or a mapping with `logits`.
            targets: Indices without the class dim, or probabilities of the logits' shape.
        """
        logits = logits_of(outputs).float()
        if is_dense(logits, targets):
            self.total += soft_cross_entropy(logits, targets, reduction="sum")
            self.count += targets.numel() // targets.shape[1]
            return
        logits = logits.movedim(class_dim(logits, targets), 1)
        self.total += soft_cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")
        self.count += is_counted(targets, self.ignore_index).sum()


class LossMetric(SumMean):
    """The mean of a loss function over the samples.

    Args:
        loss_function: `(outputs, targets) -> mean loss`, a scalar.
        options: Options of `torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], **options: Any) -> None:
        super().__init__(**options)
        self.loss_function = loss_function

    def update(self, outputs: Any, targets: Any, weight: float | None = None) -> None:
        """Add a batch.

        Args:
            outputs: The outputs of the model.
            targets: The targets, as the loss function takes them.
            weight: The weight of the batch; the number of targets in dim 0 if None.
        """
        weight = float(len(targets)) if weight is None else weight
        self.total += self.loss_function(outputs, targets) * weight
        self.count += weight


class MaskedAccuracy(SumMean):
    """The share of correct predictions among the targets that are not ignored.

    Args:
        ignore_index: Targets with this index do not count.
        options: Options of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(**options)
        self.ignore_index = ignore_index

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Logits `(N, C, ...)` or `(N, ..., C)`, or a mapping with `logits`.
            targets: Indices without the class dim.
        """
        logits = logits_of(outputs)
        predictions = logits.argmax(class_dim(logits, targets))
        # A product of masks: selecting by a mask would read the device.
        counted = is_counted(targets, self.ignore_index)
        self.total += ((predictions == targets) & counted).sum()
        self.count += counted.sum()


class BinaryF1Score(tm.BinaryF1Score):
    """torchmetrics' F1 score of two classes, which also takes logits of both classes.

    Args:
        options: Options of `torchmetrics.classification.BinaryF1Score`.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("validate_args", False)  # the validation reads the device
        super().__init__(**options)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Logits of two classes, `(N, 2)`, probabilities `(N,)`, or a mapping with `logits`.
            targets: 0 or 1, `(N,)`.
        """
        logits = logits_of(outputs)
        if logits.dim() == targets.dim() + 1:
            logits = logits.argmax(class_dim(logits, targets))
        super().update(logits, targets)


check_arguments([CrossEntropy, LossMetric, MaskedAccuracy], passed_on=OPTIONS)
