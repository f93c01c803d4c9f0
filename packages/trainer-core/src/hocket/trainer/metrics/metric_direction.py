"""The direction of a metric: whether more of it is better, for callbacks that compare its values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.trainer.state import State

_LESS = frozenset({"cer", "ece", "entropy", "error", "fid", "loss", "mae", "mse", "nll", "perplexity", "wer"})
_LESS |= {"brier", "divergence", "hinge", "mape", "ppl", "rmse"}
_MORE = frozenset({"accuracy", "acc", "auc", "auroc", "bleu", "dice", "f1", "iou", "precision", "recall"})
_MORE |= {"miou", "psnr", "r2", "rouge", "ssim"}
# A capital letter begins a word, capitals in a row are one word, and `_`, `-`, `/` and spaces end one.
_WORDS = re.compile(r"m?I[oO]U|[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*|\d+", re.ASCII)


def is_higher_better(name: str, metric: Any = None) -> bool | None:
    """Return whether a larger value of a metric is better; None if neither the metric nor its name says so.

    Args:
        name: The metric's name, such as `"MulticlassAccuracy"` or `"metrics/eval/CrossEntropy"`.
        metric: The metric itself, whose `higher_is_better` counts before its name, as in torchmetrics.
    """
    stated = getattr(metric, "higher_is_better", None)
    if isinstance(stated, bool):
        return stated
    words = {word.lower() for word in _WORDS.findall(name.rpartition("/")[2])}
    is_less, is_more = not words.isdisjoint(_LESS), not words.isdisjoint(_MORE)
    return None if is_less == is_more else is_more


def metric_values(state: State) -> dict[str, Any]:
    """Return the last values of the metrics as numbers, by their names in the log; reads the device.

    The entry `higher_is_better` has the direction of each metric that has one, for `KeepBest`.
    """
    values: dict[str, Any] = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in state.metric_values.items()
    }
    directions = {name: metric_direction(state, name) for name in values}
    known = {name: is_higher for name, is_higher in directions.items() if is_higher is not None}
    return values | ({"higher_is_better": known} if known else {})


def metric_direction(state: State, name: str) -> bool | None:
    """Return whether more of a metric is better, by its name in the log; None if that is not known."""
    _, _, label = name.partition("/")
    label, _, metric_name = label.rpartition("/")
    metrics = state.train_metrics if label == "train" else state.eval_metrics.get(label, {})
    return is_higher_better(name, metrics.get(metric_name))
