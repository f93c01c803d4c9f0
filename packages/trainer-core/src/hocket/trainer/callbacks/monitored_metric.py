"""The lookup of a metric by name, for callbacks that stop the training on its value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.notices import print_notices
from hocket.trainer.metrics.metric_direction import is_higher_better

if TYPE_CHECKING:
    from hocket.trainer.state import State

Compare = Callable[[Any, Any], bool]

_COMPARISONS = {"lt": operator.lt, "less": operator.lt, "gt": operator.gt, "greater": operator.gt}


class MonitoredMetric:
    """A metric of training or of an evaluator, and the comparison of its values.

    Args:
        monitor: The metric's name, `"MulticlassAccuracy"`, or its full name in the log,
            `"metrics/eval/MulticlassAccuracy"`.
        dataloader_label: `"train"` or an evaluator's label; None to read it from the full name.
        comp: A function that returns whether its first argument is better than its second, `"lt"` or `"gt"`;
            None for the metric's `higher_is_better`, else for what its name says.

    Raises:
        TrainerConfigError: If there is neither a label nor a full name, or they contradict each other, or
            `comp` is another string.
    """

    def __init__(self, monitor: str, dataloader_label: str | None, comp: Compare | str | None) -> None:
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
        self._is_better = None if comp is None else _comparison(comp)

    def __str__(self) -> str:
        return f"metrics/{self.label}/{self.name}"

    @property
    def is_of_training(self) -> bool:
        """Whether the metric is a training metric."""
        return self.label == "train"

    def check(self, state: State) -> None:
        """Check that there is such a metric, and that its values can be compared.

        Raises:
            TrainerConfigError: If no evaluator has the label, there is no such metric, or nothing says
                whether more of it is better.
        """
        labels = [evaluator.label for evaluator in state.evaluators]
        if not self.is_of_training and self.label not in labels:
            known_labels = ", ".join(f"`{label}`" for label in ["train", *labels])
            raise TrainerConfigError(
                f"there is no evaluator `{self.label}` to monitor; there are {known_labels}"
            )
        self._find_comparison(self._find(state))

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one; called after `check` or `read`."""
        assert self._is_better is not None
        return bool(self._is_better(value, other))

    def stop(self, state: State, reason: str) -> None:
        """Stop the training, and print the reason on rank 0."""
        print_notices(state, [f"stopping after {state.timestamp.batch.describe()}: {reason}"])
        state.stop_training(reason)

    def read(self, state: State) -> float:
        """Return the metric's value. Reads it from the device; collective if it is not yet computed.

        Raises:
            TrainerConfigError: If there is no such metric, or it is not a single number.
        """
        metric = self._find(state)
        self._find_comparison(metric)
        value = metric.compute()
        if not isinstance(value, float | int) and torch.as_tensor(value).numel() != 1:
            raise TrainerConfigError(
                f"the metric `{self.name}` is not a single number; monitor one that is, such as a mean"
            )
        return float(value)

    def _find(self, state: State) -> Any:
        metrics = state.train_metrics if self.is_of_training else state.eval_metrics.get(self.label, {})
        if self.name not in metrics:
            metric_names = ", ".join(f"`{name}`" for name in sorted(metrics)) or "none"
            raise TrainerConfigError(
                f"`{self.label}` has no metric `{self.name}` to monitor; there are: {metric_names}"
            )
        return metrics[self.name]

    def _find_comparison(self, metric: Any) -> None:
        if self._is_better is not None:
            return
        is_higher = is_higher_better(self.name, metric)
        if is_higher is None:
            raise TrainerConfigError(
                f"neither the metric `{self.name}` nor its name says whether more of it is better; pass "
                "`comp='gt'` if it is, or `comp='lt'` if less is"
            )
        self._is_better = operator.gt if is_higher else operator.lt


def _comparison(comp: Compare | str) -> Compare:
    if isinstance(comp, str):
        if comp not in _COMPARISONS:
            raise TrainerConfigError(f"`comp` is `{comp}`; expected `lt`, `gt` or a function of two numbers")
        return _COMPARISONS[comp]
    compare = comp
    # Tensors, because `torch.less` and the like take nothing else.
    return lambda one, other: bool(compare(_as_tensor(one), _as_tensor(other)))


def _as_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")  # not in the program's default dtype


def _split(monitor: str) -> tuple[str | None, str]:
    parts = monitor.split("/")
    if parts[0] == "metrics" and len(parts) >= 3:
        return "/".join(parts[1:-1]), parts[-1]
    return None, monitor
