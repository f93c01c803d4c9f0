"""The training loop, and what ends it."""

from hocket.trainer.loop.loop import train, train_batch

__all__ = ["train", "train_batch"]
