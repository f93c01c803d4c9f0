"""SWA: the mean of the weights of the last part of training."""

from hocket.algos.swa.swa import SWA

__all__ = ["SWA"]
