"""Metrics, as `composer.metrics`."""

from __future__ import annotations

from torchmetrics.detection import MeanAveragePrecision as MAP  # noqa: N817 - Composer's name

from hocket.trainer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
    MIoU,
)

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
