"""Classes, functions and layers of the training methods, as `composer.algorithms.blurpool` and its like."""

from __future__ import annotations

from hocket.algos.blurpool import BlurConv2d, BlurMaxPool2d, blur_2d
from hocket.algos.factorize import FactorizedConv2d, FactorizedLinear
from hocket.algos.gyro_dropout import GyroDropoutLayer
from hocket.algos.no_op_model import NoOpModelClass
from hocket.compat.composer import algorithms, functional
from hocket.compat.composer.algorithms import *  # noqa: F403
from hocket.compat.composer.functional import *  # noqa: F403

__all__ = [
    *algorithms.__all__,
    *functional.__all__,
    "BlurConv2d",
    "BlurMaxPool2d",
    "FactorizedConv2d",
    "FactorizedLinear",
    "GyroDropoutLayer",
    "NoOpModelClass",
    "blur_2d",
]
