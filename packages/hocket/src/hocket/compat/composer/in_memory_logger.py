"""`InMemoryLogger` whose points have the time at which they were logged, as in Composer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hocket.trainer import Logger, LoggerDestination, State, Timestamp
from hocket.trainer.loggers import InMemoryLogger as _InMemoryLogger


class TimedStep(int):
    """A step with the time at which something was logged."""

    timestamp: Timestamp

    @classmethod
    def at(cls, step: int, timestamp: Timestamp) -> TimedStep:
        """Make a step with a time.

        Args:
            step: The number of the step.
            timestamp: The time.
        """
        made = cls(step)
        made.timestamp = timestamp
        return made


class InMemoryLogger(_InMemoryLogger):
    """A logger that keeps everything that is logged; a read waits until the logged values have arrived.

    Attributes:
        state: The run's state; None before `init`.
    """

    def __init__(self) -> None:
        LoggerDestination.__init__(self)
        self.state: State | None = None
        self.images = {}
        self.traces = {}
        self._logger: Logger | None = None
        self._points: dict[str, list[tuple[Timestamp, Any]]] = {}
        self._settings: dict[str, Any] = {}
        self._tables: dict[str, str] = {}

    def bind(self, logger: Logger) -> None:
        """Set the logger that delivers the values."""
        self._logger = logger

    def init(self, state: State, logger: Logger) -> None:
        """Set the state, whose time is used in direct calls of `log_metrics`."""
        self.state = state
        super().init(state, logger)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The pairs (timestamp, number) by metric name, in the order in which they were logged."""
        self._wait()
        return self._points

    @property
    def most_recent_values(self) -> Any:  # type: ignore[override]
        """The last number by metric name."""
        return {name: points[-1][1] for name, points in self.data.items()}

    @property
    def most_recent_timestamps(self) -> dict[str, Timestamp]:
        """The time of the last number by metric name."""
        return {name: points[-1][0] for name, points in self.data.items()}

    @property
    def hyperparameters(self) -> Any:  # type: ignore[override]
        """The settings that were logged."""
        self._wait()
        return self._settings

    @property
    def tables(self) -> Any:  # type: ignore[override]
        """The last table by name, as JSON with `columns` and `data`."""
        self._wait()
        return self._tables

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the numbers."""
        timestamp = getattr(step, "timestamp", None)
        if timestamp is None:
            timestamp = Timestamp(batch=step or 0) if self.state is None else self.state.timestamp
        for name, number in metrics.items():
            self._points.setdefault(name, []).append((timestamp, number))

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Keep the settings."""
        self._settings.update(parameters)

    def log_table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        name: str = "Table",
        step: int | None = None,
    ) -> None:
        """Keep the table."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._tables[name] = json.dumps(table, ensure_ascii=False, default=str)

    def get_timeseries(self, metric: str) -> dict[str, Any]:
        """Return the numbers of one metric over time, as arrays of one length.

        Returns:
            The numbers under the metric's name, and the counts of the timestamps under `epoch`, `batch` and
            their other names.

        Raises:
            KeyError: If nothing of that name was logged.
        """
        points = self.data.get(metric)
        if points is None:
            names = ", ".join(f"`{name}`" for name in sorted(self.data)) or "nothing"
            raise KeyError(f"`{metric}` was not logged; logged was {names}")
        counts: list[Mapping[str, Any]] = [timestamp.state_dict() for timestamp, _ in points]
        series = {name: np.array([one[name] for one in counts]) for name in counts[0]}
        return {metric: np.array([number for _, number in points]), **series}

    def _wait(self) -> None:
        if self._logger is not None:
            self._logger.flush(to=self)


__all__ = ["InMemoryLogger", "TimedStep"]
