"""Callbacks that watch a training."""

from hocket.trainer.callbacks.lr_monitor import LRMonitor
from hocket.trainer.callbacks.speed_monitor import SpeedMonitor

__all__ = ["LRMonitor", "SpeedMonitor"]
