"""The lookup of a metric by name, for callbacks that stop the training on its value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hocket.trainer.errors import TrainerConfigError

if TYPE_CHECKING:
    from hocket.trainer.state import State

Compare = Callable[[Any, Any], bool]

_LESS_IS_BETTER = ("loss", "error", "perplexity")
_COMPARISONS = {"lt": operator.lt, "less": operator.lt, "gt": operator.gt, "greater": operator.gt}


class MonitoredMetric:
    """A metric of training or of an evaluator.

    Args:
        monitor: The metric's name, `"MulticlassAccuracy"`, or its full name in the log,
            `"metrics/eval/MulticlassAccuracy"`.
        dataloader_label: `"train"` or an evaluator's label; None to read it from the full name.

    Raises:
        TrainerConfigError: If there is neither a label nor a full name, or they contradict each other.
    """

    def __init__(self, monitor: str, dataloader_label: str | None) -> None:
        label_in_name, name = _split(monitor)
        if dataloader_label is None and label_in_name is None:
            raise TrainerConfigError(
                f"`{monitor}` may be a metric of training or of any evaluator; pass `dataloader_label=`, or "
                f"the full name such as `metrics/eval/{monitor}`"
            )
        if None not in (dataloader_label, label_in_name) and dataloader_label != label_in_name:
            raise TrainerConfigError(
                f"`dataloader_label` is `{dataloader_label}`, and `{monitor}` is a metric of "
                f"`{label_in_name}`; drop one of them"
            )
        self.name = name
        self.label = dataloader_label or label_in_name or ""

    @property
    def is_of_training(self) -> bool:
        """Whether the metric is a training metric."""
        return self.label == "train"

    def check_label(self, state: State) -> None:
        """Check that an evaluator has the label.

        Raises:
            TrainerConfigError: If none has.
        """
        labels = [evaluator.label for evaluator in state.evaluators]
        if not self.is_of_training and self.label not in labels:
            known_labels = ", ".join(f"`{label}`" for label in ["train", *labels])
            raise TrainerConfigError(
                f"there is no evaluator `{self.label}` to monitor; there are {known_labels}"
            )

    def read(self, state: State) -> float:
        """Return the metric's value. Reads it from the device; collective if it is not yet computed.

        Raises:
            TrainerConfigError: If there is no such metric, or it is not a single number.
        """
        metrics = state.train_metrics if self.is_of_training else state.eval_metrics.get(self.label, {})
        if self.name not in metrics:
            metric_names = ", ".join(f"`{name}`" for name in sorted(metrics)) or "none"
            raise TrainerConfigError(
                f"`{self.label}` has no metric `{self.name}` to monitor; there are: {metric_names}"
            )
        value = metrics[self.name].compute()
        if not isinstance(value, float | int) and torch.as_tensor(value).numel() != 1:
            raise TrainerConfigError(
                f"the metric `{self.name}` is not a single number; monitor one that is, such as a mean"
            )
        return float(value)


def comparison(comp: Compare | str | None, metric_name: str) -> Compare:
    """Return the function that returns whether its first argument is better than its second.

    Args:
        comp: A function of two numbers, `"lt"`, `"gt"`, or None: less is better if the metric's name contains
            `loss`, `error` or `perplexity`, else more.
        metric_name: The metric's name.

    Raises:
        TrainerConfigError: If `comp` is another string.
    """
    if comp is None:
        is_less = any(part in metric_name.lower() for part in _LESS_IS_BETTER)
        return operator.lt if is_less else operator.gt
    if isinstance(comp, str):
        if comp not in _COMPARISONS:
            raise TrainerConfigError(f"`comp` is `{comp}`; expected `lt`, `gt` or a function of two numbers")
        return _COMPARISONS[comp]
    compare = comp
    # Tensors, because `torch.less` and the like take nothing else.
    return lambda one, other: bool(compare(torch.tensor(one), torch.tensor(other)))


def _split(monitor: str) -> tuple[str | None, str]:
    parts = monitor.split("/")
    if parts[0] == "metrics" and len(parts) >= 3:
        return "/".join(parts[1:-1]), parts[-1]
    return None, monitor
