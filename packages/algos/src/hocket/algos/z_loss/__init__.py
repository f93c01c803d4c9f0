"""z-loss: keeps the normalizer of the softmax near 1."""

from hocket.algos.z_loss.z_loss import ZLoss, z_loss

__all__ = ["ZLoss", "z_loss"]
