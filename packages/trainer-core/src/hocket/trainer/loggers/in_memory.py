"""A logger that keeps everything in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch
from hocket.trainer.loggers.logger_destination import LoggerDestination


class InMemoryLogger(LoggerDestination):
    """Keeps everything that is logged, on every rank: for notebooks and tests.

    Values arrive shortly after they are logged; `logger.flush()`, which the end of `fit` calls, waits for
    them.

    Attributes:
        data: By metric name, the pairs (step, number) in the order in which they were logged.
        most_recent_values: By metric name, the last number.
        hyperparameters: The settings that were logged.
        tables: By table name, the triples (step, columns, rows).
        images: By name, the pairs (step, `ImageBatch`).
        traces: By name, the last report.
    """

    reads_outputs = False

    rank_zero_only = False
    shares_thread = True

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[int, Number]]] = {}
        self.most_recent_values: dict[str, Number] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.tables: dict[str, list[tuple[int, list[str], list[list[Any]]]]] = {}
        self.images: dict[str, list[tuple[int, ImageBatch]]] = {}
        self.traces: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the numbers."""
        for name, number in metrics.items():
            self.data.setdefault(name, []).append((step, number))
        self.most_recent_values.update(metrics)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Keep the settings."""
        self.hyperparameters.update(parameters)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Keep the table."""
        self.tables.setdefault(name, []).append((step, list(columns), [list(row) for row in rows]))

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Keep the images."""
        self.images.setdefault(name, []).append((step, images))

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Keep the reports."""
        self.traces.update(traces)

    def get_timeseries(self, metric: str) -> dict[str, list[Any]]:
        """Return the numbers of one metric over time.

        Returns:
            Two lists of one length: the steps under `"step"`, the numbers under the metric's name.

        Raises:
            KeyError: If nothing of that name was logged.
        """
        if metric not in self.data:
            metric_names = ", ".join(f"`{name}`" for name in sorted(self.data)) or "nothing"
            raise KeyError(f"`{metric}` was not logged; logged was {metric_names}")
        points = list(self.data[metric])
        return {"step": [step for step, _ in points], metric: [number for _, number in points]}
