"""A logger that prints lines to a console."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from hocket.trainer.callback import PeriodicCallback
from hocket.trainer.interval import IsTime
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.notices import print_line
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State


class ConsoleLogger(PeriodicCallback, LoggerDestination):
    """Prints the latest numbers at intervals, one line each time.

    Args:
        log_interval: Time between two lines, such as `"10ba"` or `"1ep"`. The end of training also gets one.
        stream: `"stdout"`, `"stderr"` or an open text file.
        log_traces: Whether to print reports of algorithms.
    """

    reads_outputs = False
    shares_thread = True

    def __init__(
        self,
        log_interval: TimeInput | IsTime = "1ba",
        stream: str | TextIO = "stderr",
        log_traces: bool = False,
    ) -> None:
        super().__init__(log_interval, at_end=True)
        if isinstance(stream, str) and stream not in ("stdout", "stderr"):
            raise ValueError(f"`stream` is `{stream}`; expected `stdout`, `stderr` or an open text file")
        self._stream = stream
        self._prints_traces = log_traces
        self._fresh: dict[str, Number] = {}

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the numbers for the next line."""
        self._fresh.update(metrics)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Print the settings."""
        for name, value in parameters.items():
            self._print(f"{name}: {value}")

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Print the table, one row a line."""
        self._print(f"{name} (batch {step}): {' | '.join(columns)}")
        for row in rows:
            self._print("  " + " | ".join(str(value) for value in row))

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Print the reports, if `log_traces` is set."""
        if self._prints_traces:
            for name, trace in traces.items():
                self._print(f"{name}: {trace}")

    def eval_end(self, state: State, logger: Logger) -> None:
        """Print the results of the evaluation."""
        self.act(state, logger)

    def act(self, state: State, logger: Logger) -> None:
        """Print the numbers that are new."""
        counts = state.timestamp.counts
        logger.call(self, partial(self._print_fresh, f"[epoch {counts.epoch}, batch {counts.batch}]"))

    def _print_fresh(self, when: str) -> None:
        if not self._fresh:
            return
        shown = "  ".join(f"{name}: {format_number(number)}" for name, number in self._fresh.items())
        self._fresh.clear()
        self._print(f"{when} {shown}")

    def _print(self, line: str) -> None:
        # Looked up each time: a notebook or a test may have replaced the stream.
        if isinstance(self._stream, str):
            print_line(line, getattr(sys, self._stream))
        else:
            print(line, file=self._stream, flush=True)


def format_number(number: Number) -> str:
    """Format a number for display: a float with four significant digits, any other number in full."""
    return f"{number:.4g}" if isinstance(number, float) else str(number)
