"""The model interface and ready models."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.loss import soft_cross_entropy
from hocket.trainer.models.base import ComposerModel, LossSum
from hocket.trainer.models.classifier import ComposerClassifier
from hocket.trainer.models.huggingface import HuggingFaceModel

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel", "LossSum", "soft_cross_entropy"]

check_arguments([ComposerClassifier, HuggingFaceModel])
