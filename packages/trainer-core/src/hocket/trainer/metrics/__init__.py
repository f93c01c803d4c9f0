"""Metrics beside those of torchmetrics, and how the trainer gathers and keeps metrics.

All of the metrics keep sums, so any split of the data gives the same.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.trainer.metrics.classification import BinaryF1Score, CrossEntropy, LossMetric, MaskedAccuracy
    from hocket.trainer.metrics.language import LanguageCrossEntropy, LanguagePerplexity
    from hocket.trainer.metrics.segmentation import Dice, MIoU

__all__ = [
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]

_MODULES = {
    **dict.fromkeys(("BinaryF1Score", "CrossEntropy", "LossMetric", "MaskedAccuracy"), "classification"),
    **dict.fromkeys(("LanguageCrossEntropy", "LanguagePerplexity"), "language"),
    **dict.fromkeys(("Dice", "MIoU"), "segmentation"),
}


def __getattr__(name: str) -> Any:
    # torchmetrics takes a second to import, and the trainer imports this package's other modules.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
