"""Metrics, as `composer.metrics`."""

from __future__ import annotations

from torchmetrics.detection import MeanAveragePrecision as MAP  # noqa: N817 - Composer's name

import hocket.trainer.metrics as _metrics
from hocket.compat.composer.signatures import class_in_order
from hocket.trainer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    LossMetric,
    MaskedAccuracy,
    MIoU,
)

LanguageCrossEntropy = class_in_order(
    _metrics.LanguageCrossEntropy, "dist_sync_on_step ignore_index", __name__
)
LanguagePerplexity = class_in_order(_metrics.LanguagePerplexity, "dist_sync_on_step ignore_index", __name__)

__all__ = [
    "MAP",
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]
