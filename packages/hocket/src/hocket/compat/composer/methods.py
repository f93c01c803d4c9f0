"""Classes, functions and layers of the training methods, as in `composer.algorithms.blurpool` and others."""

from __future__ import annotations

from hocket.algos.alibi import policy_registry
from hocket.algos.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from hocket.algos.errors import NoEffectWarning
from hocket.algos.factorize import (
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    factorize_conv2d,
    factorize_matrix,
)
from hocket.algos.gyro_dropout import GyroDropoutLayer
from hocket.algos.low_precision_norm.low_precision_norm import LPGroupNorm, LPLayerNorm
from hocket.algos.no_op_model import NoOpModelClass
from hocket.compat.composer import algorithms, functional
from hocket.compat.composer.absent import absent_from
from hocket.compat.composer.algorithms import *  # noqa: F403
from hocket.compat.composer.ema_parameters import EMAParameters
from hocket.compat.composer.functional import *  # noqa: F403
from hocket.compat.composer.sam_optimizer import SAMOptimizer

__all__ = [
    *algorithms.__all__,
    *functional.__all__,
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "EMAParameters",
    "FactorizedConv2d",
    "FactorizedLinear",
    "GyroDropoutLayer",
    "LPGroupNorm",
    "LPLayerNorm",
    "LowRankSolution",
    "NoEffectWarning",
    "NoOpModelClass",
    "SAMOptimizer",
    "blur_2d",
    "blurmax_pool2d",
    "factorize_conv2d",
    "factorize_matrix",
    "policy_registry",
]

__getattr__ = absent_from("composer.algorithms")
