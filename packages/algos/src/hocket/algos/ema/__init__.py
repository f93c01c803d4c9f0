"""EMA: an exponential moving average of the weights, for evaluation."""

from hocket.algos.ema.ema import EMA, compute_ema

__all__ = ["EMA", "compute_ema"]
