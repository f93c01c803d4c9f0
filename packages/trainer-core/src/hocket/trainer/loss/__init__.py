"""Loss functions: cross-entropies for index and dense targets, and the Dice loss."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.loss.cross_entropy import binary_cross_entropy_with_logits, soft_cross_entropy
from hocket.trainer.loss.dice import DiceLoss
from hocket.trainer.loss.linear_cross_entropy import linear_cross_entropy

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "linear_cross_entropy", "soft_cross_entropy"]

check_arguments(globals()[name] for name in __all__)
