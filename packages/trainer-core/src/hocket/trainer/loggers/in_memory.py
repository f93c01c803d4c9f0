"""A logger that keeps everything in memory."""

from __future__ import annotations

from typing import Any

from hocket.trainer.capture import Number
from hocket.trainer.logger import LoggerDestination


class InMemoryLogger(LoggerDestination):
    """Keeps every number, on every rank: for notebooks and tests.

    Numbers arrive a little after they are logged; `logger.flush()`, which the end of `fit` calls, waits for
    them.

    Attributes:
        data: By name, the pairs (step, number) in the order in which they were logged.
        most_recent_values: By name, the last number.
        hyperparameters: The settings that were logged.
    """

    rank_zero_only = False

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[int, Number]]] = {}
        self.most_recent_values: dict[str, Number] = {}
        self.hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the numbers."""
        for name, number in metrics.items():
            self.data.setdefault(name, []).append((step, number))
        self.most_recent_values.update(metrics)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Keep the settings."""
        self.hyperparameters.update(parameters)

    def get_timeseries(self, metric: str) -> dict[str, list[Any]]:
        """The numbers of one metric over time.

        Returns:
            Two lists of one length: the steps under `"step"`, the numbers under the metric's name.

        Raises:
            KeyError: If nothing of that name was logged.
        """
        if metric not in self.data:
            known = ", ".join(f"`{name}`" for name in sorted(self.data)) or "nothing"
            raise KeyError(f"`{metric}` was not logged; logged was {known}")
        points = list(self.data[metric])
        return {"step": [step for step, _ in points], metric: [number for _, number in points]}
