"""MixUp: convex combinations of samples and their targets."""

from hocket.algos.mixup.mixup import MixUp, mixup_batch

__all__ = ["MixUp", "mixup_batch"]
