"""The model interface and a ready classifier."""

from hocket.trainer.models.base import ComposerModel, LossSum
from hocket.trainer.models.classifier import ComposerClassifier, soft_cross_entropy

__all__ = ["ComposerClassifier", "ComposerModel", "LossSum", "soft_cross_entropy"]
