"""Metrics, as `composer.metrics`."""

from __future__ import annotations

from typing import Any

import hocket.trainer.metrics as _metrics
from hocket.compat.composer.absent import NotInstalled
from hocket.compat.composer.signatures import class_in_order
from hocket.trainer.errors import MissingExtraError
from hocket.trainer.metrics import (
    BinaryF1Score,
    CrossEntropy,
    Dice,
    LossMetric,
    MaskedAccuracy,
    MIoU,
)
from hocket.trainer.process.extras import import_extra

LanguageCrossEntropy = class_in_order(
    _metrics.LanguageCrossEntropy, "dist_sync_on_step ignore_index", __name__
)
LanguagePerplexity = class_in_order(_metrics.LanguagePerplexity, "dist_sync_on_step ignore_index", __name__)

__all__ = [
    "MAP",  # noqa: F822 - made by `__getattr__`
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]


def __getattr__(name: str) -> Any:
    """Return `MAP`, which torchmetrics has only with torchvision; without it, each use of it raises."""
    if name != "MAP":
        raise AttributeError(f"module `composer.metrics` has no attribute `{name}`", name=name)
    try:
        import_extra("torchvision", "torchvision", needed_by=name)
        return import_extra("torchmetrics.detection.mean_ap", None, needed_by=name).MeanAveragePrecision
    except MissingExtraError as error:
        return NotInstalled(name, error)
