"""Dropout with masks that are selected beforehand."""

from hocket.algos.gyro_dropout.gyro_dropout import GyroDropout, apply_gyro_dropout
from hocket.algos.gyro_dropout.layers import GyroDropoutLayer, mask_period

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout", "mask_period"]
