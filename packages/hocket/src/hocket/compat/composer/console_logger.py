"""`ConsoleLogger` that prints its lines in Composer's form, which scripts search for in logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

import torch
import yaml  # type: ignore[import-untyped]

from hocket.trainer import Logger, State
from hocket.trainer.loggers import ConsoleLogger as _ConsoleLogger
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time

#: Maximum number of lines of progress in one evaluation, with the line at its end.
_NUM_EVAL_LINES = 11


class ConsoleLogger(_ConsoleLogger):
    """A logger that prints a line of progress, and below it the newest numbers, one on each line.

    It prints at the interval, after the first batch or epoch and at the end of training. In an evaluation it
    prints the progress ten times, and the metrics at the end. Numbers of the training that were logged before
    an evaluation are printed with the next numbers of the training.

    Args:
        log_interval: The interval in batches or epochs.
        stream: `"stdout"`, `"stderr"` or an open text file.
        log_traces: Whether to print reports of algorithms.

    Attributes:
        tables: The tables logged so far as JSON, by name; each is printed below every line of progress.

    Raises:
        ValueError: If the interval has another unit, or the stream another name.
    """

    def __init__(
        self,
        log_interval: TimeInput = "1ba",
        stream: str | TextIO = "stderr",
        log_traces: bool = False,
    ) -> None:
        stream = stream.lower() if isinstance(stream, str) else stream
        super().__init__(log_interval, stream, log_traces)
        self.log_interval = ensure_time(log_interval, TimeUnit.EPOCH)
        if self.log_interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            raise ValueError(f"`log_interval` is `{self.log_interval}`; expected batches or epochs")
        self.tables: dict[str, str] = {}
        self._hyperparameters: dict[str, Any] = {}
        self._are_told = False
        self._in_eval: dict[str, Any] | None = None
        self._last_batch = 0
        self._eval_lines: frozenset[int] = frozenset()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the numbers for the next lines."""
        (self._fresh if self._in_eval is None else self._in_eval).update(metrics)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Keep the settings, which are printed when a run starts."""
        self._hyperparameters.update(parameters)

    def log_table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        name: str = "Table",
        step: int | None = None,
    ) -> None:
        """Keep the table for the next lines."""
        content = {"columns": list(columns), "data": [list(row) for row in rows]}
        self.tables[name] = json.dumps(content, default=str)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Print the reports, if `log_traces` was set."""
        if self._prints_traces:
            for name, trace in traces.items():
                self._print(f"[trace]: {name}:{format_log_data_value(trace)}\n")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Print the settings, the first time."""
        self._tell_settings(logger)

    def predict_start(self, state: State, logger: Logger) -> None:
        """Print the settings, the first time."""
        self._tell_settings(logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print a line, if the interval is in batches and one is due."""
        self._train_line(state, logger, TimeUnit.BATCH, state.timestamp.counts.batch)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Print a line, if the interval is in epochs and one is due."""
        self._train_line(state, logger, TimeUnit.EPOCH, state.timestamp.counts.epoch)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Print the remaining numbers, and wait until they are printed."""
        if self._last_batch != state.timestamp.counts.batch:
            logger.call(self, partial(self._print_fresh, _train_progress(state)))
        logger.flush(to=self)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Choose the batches after which progress is printed."""
        self._tell_settings(logger)
        total = _eval_length(state)
        last = _NUM_EVAL_LINES - 1
        marks = (
            range(1, total)
            if total < _NUM_EVAL_LINES
            else [round(1 + (total - 1) * part / last) for part in range(_NUM_EVAL_LINES)]
        )
        self._eval_lines = frozenset(marks) - {total}
        logger.call(self, self._begin_eval)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Print the progress, if this batch was chosen."""
        if state.eval_timestamp.counts.batch in self._eval_lines:
            logger.call(self, partial(self._print, self._lines(_eval_progress(state), {}, "Eval ")))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Print the results of the evaluation."""
        logger.call(self, partial(self._end_eval, _eval_progress(state)))

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Wait until all is printed."""
        logger.flush(to=self)

    def log_to_console(
        self, data: Mapping[str, Any], state: State, prefix: str = "", is_train: bool = True
    ) -> None:
        """Print a line of progress, and numbers with their names below it.

        Args:
            data: The numbers.
            state: The state with the progress.
            prefix: Text before each name.
            is_train: Whether the progress is that of the training, not of an evaluation.
        """
        progress = _train_progress(state) if is_train else _eval_progress(state)
        self._print(self._lines(progress, data, prefix))

    def _train_line(self, state: State, logger: Logger, unit: TimeUnit, count: int) -> None:
        interval = self.log_interval
        if interval.unit is unit and (count % int(interval.value) == 0 or self._last_batch == 0):
            self._last_batch = state.timestamp.counts.batch
            logger.call(self, partial(self._print_fresh, _train_progress(state)))

    def _print_fresh(self, when: str) -> None:
        metrics, self._fresh = self._fresh, {}
        self._print(self._lines(when, metrics, "Train "))

    def _begin_eval(self) -> None:
        self._in_eval = {}

    def _end_eval(self, when: str) -> None:
        measured, self._in_eval = self._in_eval or {}, None
        self._print(self._lines(when, measured, "Eval "))

    def _tell_settings(self, logger: Logger) -> None:
        if not self._are_told:
            self._are_told = True
            logger.call(self, self._print_settings)

    def _print_settings(self) -> None:
        rule = "*" * 30
        plain = json.loads(json.dumps(self._hyperparameters, default=str))
        self._print(f"{rule}\nConfig:\n{yaml.safe_dump(plain)}\n{rule}")

    def _lines(self, progress: str, data: Mapping[str, Any], prefix: str) -> str:
        lines = [f"{progress}:" if data else progress]
        lines += [f"\t {prefix}{name}: {format_log_data_value(value)}" for name, value in data.items()]
        lines += [f"\t {prefix}{name}: {table}" for name, table in self.tables.items()]
        return "\n".join(lines)


def format_log_data_value(data: Any) -> str:
    """Return a value as Composer prints it: a fraction with four decimals, containers part by part."""
    if isinstance(data, str):
        return f'"{data}"'
    if isinstance(data, float):
        return f"{data:.4f}"
    if isinstance(data, torch.Tensor):
        return format_log_data_value(data.item()) if data.numel() == 1 else f"Tensor of shape {data.shape}"
    if isinstance(data, Mapping):
        return "{ " + "".join(f'"{key}": {format_log_data_value(one)}, ' for key, one in data.items()) + "}"
    if isinstance(data, Iterable):
        return "[" + ", ".join(map(format_log_data_value, data)) + "]"
    return str(data)


def _train_progress(state: State) -> str:
    duration, counts = state.max_duration, state.timestamp.counts
    if duration is None:
        return ""
    if duration.unit is not TimeUnit.EPOCH:
        return f"[{duration.unit.name.lower()}={int(state.timestamp.get(duration.unit))}/{duration.value}]"
    length = None if state.dataloader_len is None else int(state.dataloader_len)
    epoch, batch = counts.epoch, counts.batch_in_epoch
    if batch == 0 and epoch > 0:
        # An epoch has just ended, and the next one has not started.
        epoch, batch = epoch - 1, length or 0
    return f"[epoch={epoch + 1}][batch={batch}" + (f"/{length}]" if length is not None else "]")


def _eval_length(state: State) -> int:
    return 0 if state.dataloader_len is None else int(state.dataloader_len)


def _eval_progress(state: State) -> str:
    batch = state.eval_timestamp.counts.batch
    return f"[Eval batch={batch}/{_eval_length(state)}] Eval on {state.dataloader_label} data"


__all__ = ["ConsoleLogger", "format_log_data_value"]
