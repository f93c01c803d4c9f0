"""A logger that shows progress, loss, metrics, throughput and time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TextIO

from hocket.trainer.checks import check_number
from hocket.trainer.errors import TimeUnitError
from hocket.trainer.interval import share_done
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.notices import print_line
from hocket.trainer.loggers.console import format_number
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.timestamp import Counts

if TYPE_CHECKING:
    from rich.progress import Progress

    from hocket.trainer.state import State

_LOSS = "loss/train/total"
_METRICS = "metrics/"


@dataclass(frozen=True, slots=True)
class _ShownState:
    """The part of the state that is shown, copied on the training thread."""

    counts: Counts
    share: float | None
    duration: str


class ProgressBarLogger(LoggerDestination):
    """Shows progress, loss, metrics, throughput and time left on rank 0: a bar on a terminal, else lines.

    The results of each evaluation get a line of their own. Drawing is done on the logger's thread. The time
    left and the throughput leave evaluation out.

    Args:
        stream: The stream to write to; standard error by default.
        line_interval_s: Seconds between two lines where the stream is not a terminal. The first batch, the
            end of each epoch and the end of training always get a line.
    """

    reads_outputs = False
    shares_thread = True

    def __init__(self, stream: TextIO | None = None, *, line_interval_s: float = 10.0) -> None:
        check_number("line_interval_s", line_interval_s, least=0)
        self._stream = stream
        self._line_interval_s = line_interval_s
        self._interval_s = 0.1
        self._next_s = 0.0
        self._loss: Number | None = None
        self._train_metrics: dict[str, Number] = {}
        self._eval_metrics: dict[str, dict[str, Number]] = {}
        self._past: deque[_ShownState] = deque(maxlen=32)
        self._first: _ShownState | None = None
        self._bar: Progress | None = None

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the loss and the metrics."""
        for name, number in metrics.items():
            if name == _LOSS:
                self._loss = number
            elif name.startswith(_METRICS) and not isinstance(number, list):
                label, _, metric = name.removeprefix(_METRICS).rpartition("/")
                values = self._train_metrics if label == "train" else self._eval_metrics.setdefault(label, {})
                values[metric] = number

    def fit_start(self, state: State, logger: Logger) -> None:
        """Show the starting point."""
        is_terminal = False
        with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, or a closed one
            is_terminal = self._out().isatty()  # type: ignore[union-attr]
        self._interval_s = 0.1 if is_terminal else self._line_interval_s
        self._next_s = 0.0
        logger.call(self, partial(self._start, _moment(state), is_terminal=is_terminal))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Show progress, at most ten times a second on a terminal."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            logger.call(self, partial(self._show, _moment(state)))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Show progress."""
        logger.call(self, partial(self._show, _moment(state)))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Show the results of an evaluation on a line of their own."""
        logger.call(self, partial(self._show_eval, state.dataloader_label or "eval", _moment(state)))

    def fit_end(self, state: State, logger: Logger) -> None:
        """Show the end point, and leave the line on the screen."""
        logger.call(self, partial(self._finish, _moment(state)))

    def post_close(self) -> None:
        """Release the terminal, also after an error."""
        self._stop()

    def _out(self) -> TextIO | None:
        """Return the stream to write to; None without one, as in a process without a console."""
        return sys.stderr if self._stream is None else self._stream

    def _start(self, moment: _ShownState, *, is_terminal: bool) -> None:
        self._first = moment
        self._past.clear()
        self._past.append(moment)
        if is_terminal and (out := self._out()) is not None:
            self._bar = bar = _make_bar(out)
            with self._drawing():
                bar.start()
                bar.add_task("", total=None if moment.share is None else 1.0, told="")

    def _show(self, moment: _ShownState) -> None:
        self._past.append(moment)
        text = self._tell(moment)
        if self._bar is None:
            share = "" if moment.share is None else f" {moment.share:4.0%}"
            print_line(f"[train{share}] {text}", self._out())
            return
        with self._drawing():
            task = self._bar.task_ids[-1]
            self._bar.update(task, completed=moment.share or 0.0, told=text)
            self._bar.refresh()

    def _show_eval(self, label: str, moment: _ShownState) -> None:
        metrics = self._eval_metrics.get(label)
        if not metrics:
            return
        line = f"[{label}] epoch {moment.counts.epoch} batch {moment.counts.batch}  {_format_all(metrics)}"
        if self._bar is None:
            print_line(line, self._out())
        else:
            with self._drawing():
                self._bar.console.print(line, markup=False, highlight=False)

    def _finish(self, moment: _ShownState) -> None:
        if self._past and self._past[-1].counts != moment.counts:
            self._show(moment)
        self._stop()

    def _stop(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.stop()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Go on with lines in place of the bar if the terminal is gone: what is only shown ends no run."""
        try:
            yield
        except (OSError, ValueError):
            self._interval_s = self._line_interval_s
            self._stop()

    def _tell(self, moment: _ShownState) -> str:
        counts = moment.counts
        parts = [f"epoch {counts.epoch} batch {counts.batch} of {moment.duration}"]
        if self._loss is not None:
            parts.append(f"loss {format_number(self._loss)}")
        if self._train_metrics:
            parts.append(_format_all(self._train_metrics))
        old = self._past[0].counts
        seconds = counts.total_wct - old.total_wct
        if seconds > 0:
            name, num_done = ("samples", counts.sample - old.sample)
            if not num_done:
                name, num_done = ("batches", counts.batch - old.batch)
            parts.append(f"{num_done / seconds:.4g} {name}/s")
        if (left_s := self._time_left(moment)) is not None:
            parts.append(f"{_clock(left_s)} left")
        return "  ".join(parts)

    def _time_left(self, moment: _ShownState) -> float | None:
        first = self._first
        if first is None or first.share is None or moment.share is None or moment.share <= first.share:
            return None
        spent_s = moment.counts.total_wct - first.counts.total_wct
        return max(0.0, spent_s * (1.0 - moment.share) / (moment.share - first.share))


def _moment(state: State) -> _ShownState:
    counts = state.timestamp.counts
    try:
        share = min(1.0, share_done(state, counts))
    except TimeUnitError:  # no duration, or epochs of unknown length: the share is not known
        share = None
    return _ShownState(counts, share, str(state.max_duration))


def _format_all(numbers: dict[str, Number]) -> str:
    return "  ".join(f"{name} {format_number(number)}" for name, number in numbers.items())


def _clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def _make_bar(stream: TextIO) -> Progress:
    # Here, not above: rich takes a tenth of a second to import, and only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn("train"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(file=stream, emoji=False),
        auto_refresh=False,  # drawn on the logger's thread; rich would start one of its own
    )
