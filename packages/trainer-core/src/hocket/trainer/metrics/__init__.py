"""Metrics beside those of torchmetrics; all of them keep sums, so any split of the data gives the same."""

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
