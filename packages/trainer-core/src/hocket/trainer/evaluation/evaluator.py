"""`Evaluator`: a data loader to evaluate on, with its label, metrics and interval."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from hocket.trainer.checks import refuse_class
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.interval import IsTime, every
from hocket.trainer.time import Time, TimeInput, TimeUnit, ensure_time

if TYPE_CHECKING:
    from torchmetrics import Metric

DEFAULT_LABEL = "eval"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Evaluator:
    """A data loader to evaluate on.

    Fields that are None are taken from the trainer's arguments.

    Raises:
        TrainerConfigError: If a field is invalid.
        TimeValueError: If `eval_interval` is no time, or negative.

    Example:
        >>> Evaluator(label="test", dataloader=test_loader, metric_names=["Accuracy"], eval_interval="100ba")
    """

    label: str
    """The name of the results: `state.eval_metrics[label]`, and `metrics/<label>/<Name>` in the log."""
    dataloader: Any
    """The loader of this rank's batches; or a `DataSpec`, or a dict of its arguments."""
    metric_names: Sequence[str] | None = None
    """Regular expressions, searched in the names of the model's metrics regardless of case; None for all."""
    subset_num_batches: int | None = None
    """Number of batches to evaluate on each rank; -1 for all."""
    eval_interval: TimeInput | IsTime | None = None
    """Interval between evaluations; 0 for never (see `Trainer`)."""
    device_eval_microbatch_size: int | Literal["auto"] | None = None
    """Samples that go through the model at once; None for a whole batch, `"auto"` for the training's size."""

    def __repr__(self) -> str:
        is_time = isinstance(self.eval_interval, str | int | Time)
        interval = f", every {self.eval_interval}" if is_time else ""
        return f"<Evaluator {self.label!r} on {type(self.dataloader).__name__}{interval}>"

    def __post_init__(self) -> None:
        refuse_class("eval_interval", self.eval_interval)
        if not isinstance(self.label, str) or not self.label:
            raise TrainerConfigError(
                f"the evaluator's `label` is {self.label!r}; expected a name, such as `eval`"
            )
        if isinstance(self.metric_names, str):
            raise TrainerConfigError(
                f"`metric_names` of the evaluator `{self.label}` is the text {self.metric_names!r}; expected "
                f"a list of names: [{self.metric_names!r}]"
            )
        size = self.device_eval_microbatch_size
        if size not in (None, "auto") and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise TrainerConfigError(
                f"`device_eval_microbatch_size` of the evaluator `{self.label}` is {size!r}; expected a "
                "number of samples above 0, `auto`, or None for the whole batch"
            )
        check_subset(self.subset_num_batches)
        if self.eval_interval is not None:
            as_interval(self.eval_interval)


def check_subset(number: Any) -> None:
    """Refuse a number of batches that is neither positive nor -1.

    Raises:
        TrainerConfigError: If it is neither.
    """
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if number is not None and not (is_number and (number == -1 or number > 0)):
        raise TrainerConfigError(
            f"`subset_num_batches` is {number!r}; expected a number of batches above 0, or -1 for all"
        )


def as_evaluators(
    given: Any, *, subset_num_batches: int = -1, eval_interval: TimeInput | IsTime = 1
) -> list[Evaluator]:
    """Make evaluators from an `eval_dataloader`, with their intervals and limits filled in.

    Args:
        given: None, a loader, a `DataSpec` or a dict of its arguments, an `Evaluator`, or several evaluators.
        subset_num_batches: The limit of evaluators that state none.
        eval_interval: The interval of evaluators that state none.

    Raises:
        TrainerConfigError: If evaluators and loaders are mixed, two evaluators share a label, or several
            loaders have none.
    """
    check_subset(subset_num_batches)
    evaluators = []
    for evaluator in _evaluators_of(given):
        limit, interval = evaluator.subset_num_batches, evaluator.eval_interval
        limit = subset_num_batches if limit is None else limit
        evaluators.append(
            replace(
                evaluator,
                subset_num_batches=limit,
                eval_interval=eval_interval if interval is None else interval,
            )
        )
    labels = [evaluator.label for evaluator in evaluators]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise TrainerConfigError(
            f"several evaluators have the label `{repeated[0]}`; give each its own, since results are kept "
            "and logged by label"
        )
    return evaluators


def _evaluators_of(given: Any) -> list[Evaluator]:
    if given is None:
        return []
    refuse_class("eval_dataloader", given)
    if isinstance(given, Evaluator):
        return [given]
    if isinstance(given, (list, tuple)):
        kinds = {isinstance(one, Evaluator) for one in given}
        if kinds == {True}:
            return list(given)
        if kinds == {True, False}:
            other = next(one for one in given if not isinstance(one, Evaluator))
            raise TrainerConfigError(
                f"`eval_dataloader` mixes `Evaluator`s with a `{type(other).__name__}`; wrap that as "
                "`Evaluator(label=…, dataloader=…)`, too"
            )
        if given and all(_is_loader(one) for one in given):
            if len(given) > 1:
                raise TrainerConfigError(
                    f"`eval_dataloader` has {len(given)} loaders without labels; wrap each as "
                    "`Evaluator(label=…, dataloader=…)`"
                )
            given = given[0]
    if not isinstance(given, (DataSpec, Mapping)) and not isinstance(given, Iterable):
        raise TrainerConfigError(
            f"`eval_dataloader` is a `{type(given).__name__}`; expected a data loader, a `DataSpec`, an "
            "`Evaluator`, or a list of `Evaluator`s"
        )
    return [Evaluator(label=DEFAULT_LABEL, dataloader=given)]


def _is_loader(item: Any) -> bool:
    """Return whether an item of a list is a loader; a list of batches is itself a loader."""
    if isinstance(item, DataSpec):
        return True
    return hasattr(item, "__iter__") and not isinstance(item, (torch.Tensor, list, tuple, Mapping, str))


def as_interval(interval: TimeInput | IsTime) -> IsTime | None:
    """Make a callable `(state, event) -> bool` from an evaluation interval; None for 0, which is never.

    Raises:
        TimeValueError: If it is no time, or negative.
    """
    if callable(interval):
        return interval
    length: Time = ensure_time(interval, TimeUnit.EPOCH)
    return None if length.value == 0 else every(length)


def select_metrics(metrics: Mapping[str, Metric], names: Sequence[str] | None, *, label: str) -> list[str]:
    """Return the names of the metrics that an evaluator measures.

    Args:
        metrics: The model's metrics.
        names: Regular expressions; None for all of them.
        label: The evaluator's label, for error messages.

    Raises:
        TrainerConfigError: If an expression matches none of the metrics, or cannot be compiled.
    """
    if names is None:
        return list(metrics)
    selected = set()
    for name in names:
        try:
            matches = {metric for metric in metrics if re.search(name, metric, re.IGNORECASE)}
        except re.error as error:
            raise TrainerConfigError(
                f"`{name}` in `metric_names` of the evaluator `{label}` is not a regular expression: {error}"
            ) from error
        if not matches:
            available = ", ".join(f"`{metric}`" for metric in metrics) or "none"
            raise TrainerConfigError(
                f"the evaluator `{label}` asks for the metric `{name}`, which the model does not have; "
                f"`get_metrics(is_train=False)` has: {available}"
            )
        selected |= matches
    return [metric for metric in metrics if metric in selected]
