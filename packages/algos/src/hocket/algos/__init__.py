"""Training methods for Hocket's trainer, each also a plain function."""

from hocket.algos.errors import AlgorithmConfigError, AlgorithmError, IncompatibleError
from hocket.algos.gradient_clipping import GradientClipping, apply_gradient_clipping
from hocket.algos.label_smoothing import LabelSmoothing, smooth_labels

__all__ = [
    "AlgorithmConfigError",
    "AlgorithmError",
    "GradientClipping",
    "IncompatibleError",
    "LabelSmoothing",
    "apply_gradient_clipping",
    "smooth_labels",
]
