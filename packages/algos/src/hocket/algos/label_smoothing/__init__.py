"""Label smoothing: targets that are mixed with the uniform distribution."""

from hocket.algos.label_smoothing.label_smoothing import LabelSmoothing, smooth_labels

__all__ = ["LabelSmoothing", "smooth_labels"]
