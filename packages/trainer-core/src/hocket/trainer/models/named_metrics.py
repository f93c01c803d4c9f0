"""A dict of metrics by name, from any of the forms in which a user may pass metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.checks import refuse_class
from hocket.trainer.errors import TrainerConfigError

if TYPE_CHECKING:
    from torchmetrics import Metric


def named_metrics(given: Any) -> dict[str, Metric]:
    """Return metrics by name: the names in a mapping or collection, else the names of their classes.

    Args:
        given: A torchmetrics metric, several, a mapping, or a `MetricCollection`.

    Raises:
        TrainerConfigError: If a value is not a metric, or two metrics have the same name.
    """
    from torchmetrics import Metric, MetricCollection

    if isinstance(given, Metric):
        given = [given]
    if isinstance(given, (Mapping, MetricCollection)):
        pairs = list(given.items())
    elif isinstance(given, Iterable) and not isinstance(given, str):
        pairs = [pair for one in given for pair in _pairs(one)]
    else:
        pairs = [("", given)]
    for _, metric in pairs:
        refuse_class("metrics", metric)
        if not isinstance(metric, Metric):
            raise TrainerConfigError(
                f"the metrics have a `{type(metric).__name__}`; expected metrics of torchmetrics"
            )
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TrainerConfigError(
            f"several metrics are a `{repeated[0]}`; name them in a dict, such as "
            f"`{{'{repeated[0]}-1': …, '{repeated[0]}-2': …}}`"
        )
    return dict(pairs)


def _pairs(metric: Any) -> list[tuple[str, Any]]:
    if isinstance(metric, Mapping) or type(metric).__name__ == "MetricCollection":
        return list(metric.items())
    return [(type(metric).__name__, metric)]
