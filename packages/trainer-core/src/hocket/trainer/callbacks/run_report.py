"""A callback that writes a report of the run as one HTML page."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.trainer.callbacks.report_page import PageContents, render
from hocket.trainer.callbacks.series import MetricSeries
from hocket.trainer.checks import check_number, local_path
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.models.parameter_count import describe_model
from hocket.trainer.time import Time, TimeInput, TimeUnit, describe_seconds, ensure_time

if TYPE_CHECKING:
    from hocket.trainer.state import State

_MAX_EVENTS = 400
_MAX_POINTS = 1000
# A checkpoint holds the curves; fewer points keep it small.
_MAX_SAVED_POINTS = 200
_FLUSH_TIMEOUT_S = 5.0


class RunReport(LoggerDestination):
    """Writes curves, throughput, memory, events and the outcome of a run as one HTML page.

    The page needs no other file and no network. It is written after an epoch or an evaluation, at most once
    an `interval`. It is also written at the end of training and when the trainer closes, even after an error.
    Each version replaces the one before. The page shows every logged metric: add `SpeedMonitor`,
    `MemoryMonitor` and `LRMonitor` for their curves. Warnings of Hocket's packages are shown among the
    events. Curves and events are kept in checkpoints, so that a resumed run has one report. Only rank 0
    writes.

    Args:
        filename: Path of the page; `{run_name}` is replaced.
        interval: Seconds between two versions, such as `"60sec"`.
        upload: The name to upload the page under to loggers that keep files, at the end; None for no upload.

    Example:
        >>> report = RunReport("reports/{run_name}.html")
    """

    reads_outputs = False

    def __init__(
        self,
        filename: str | os.PathLike[str] = "{run_name}/report.html",
        *,
        interval: TimeInput = "60sec",
        upload: str | None = None,
    ) -> None:
        self.filename = local_path("filename", filename)
        given = ensure_time(interval, TimeUnit.SECOND)
        if given.unit is not TimeUnit.SECOND:
            raise TrainerConfigError(f"`interval` is `{given}`; expected seconds, such as `60sec`")
        check_number("interval", given.value, least=0)
        self.interval_s = float(given.value)
        self.upload = upload
        self.path: Path | None = None
        """The file, from the start of training on."""
        self._lock = threading.Lock()
        self._series: dict[str, MetricSeries] = {}
        self._events: deque[tuple[str, int, str]] = deque(maxlen=_MAX_EVENTS)
        self._hyperparameters: dict[str, Any] = {}
        self._report: PageContents | None = None
        self._facts: dict[str, str] = {}
        self._units: dict[str, str] = {}
        self._batch = 0
        self._next_s = 0.0
        self._warnings = _WarningCollector(self)
        self._logger: Logger | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and what was reported: a lock and a logger cannot go into another process.

        Raises:
            TypeError: A trainer has the report in use.
        """
        if self._logger is not None:
            raise TypeError(
                "`RunReport` was given to a trainer and cannot be copied or pickled; copy or pickle it "
                "before that, or make a new one"
            )
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_warnings")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings over."""
        self.__dict__.update(state, _lock=threading.Lock(), _warnings=_WarningCollector(self))

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the numbers; text and lists are left out."""
        with self._lock:
            for name, number in metrics.items():
                if not isinstance(number, str | list):
                    self._series.setdefault(name, MetricSeries(_MAX_POINTS)).add(step, float(number))

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Keep the settings."""
        self._hyperparameters.update(parameters)

    def init(self, state: State, logger: Logger) -> None:
        """Start to collect warnings."""
        self._logger = logger
        if self in logger.destinations:
            logging.getLogger("hocket").addHandler(self._warnings)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record the setup of the run and its start."""
        self.path = Path(self.filename.format(run_name=state.run_name))
        self._batch = state.timestamp.counts.batch
        self._units = {
            glob: unit
            for callback in state.callbacks
            for glob, unit in getattr(callback, "metric_units", {}).items()
        }
        describe = getattr(state.parallelism, "describe", None)
        self._facts = {
            "model": describe_model(state.model, state.optimizers),
            "device": f"{state.device}, {state.precision}",
            "layout": describe() if describe is not None else type(state.parallelism).__name__,
            "ranks": str(state.parallelism.data_parallel[1]),
            "optimizers": ", ".join(type(optimizer).__name__ for optimizer in state.optimizers),
            "seed": str(state.seed),
        }
        self.note(
            "training starts"
            + ("" if state.max_duration is None else f", for {state.max_duration.describe()}")
        )

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Add an event, and write the page if it is time."""
        self._batch = state.timestamp.counts.batch
        self.note(f"epoch {state.timestamp.counts.epoch} is complete")
        self._write_if_due(state, logger)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Add an event, and write the page if it is time."""
        self._batch = state.timestamp.counts.batch
        self.note(f"evaluated on {state.dataloader_label}")
        self._write_if_due(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Add an event, and write the page."""
        self._batch = state.timestamp.counts.batch
        self.note("training ends")
        self._prepare(state, "Training has ended.")
        logger.call(self, self._write)

    def close(self, state: State, logger: Logger) -> None:
        """Record the outcome; `post_close` writes the page when all logged values have arrived."""
        error = sys.exception()
        self._batch = state.timestamp.counts.batch
        if error is not None:
            self.note(f"ended by {type(error).__name__}")
            self._prepare(state, f"Ended by {type(error).__name__} at batch {self._batch}.", error)
        elif self._report is not None:
            self._prepare(state, "Training has ended.")
        if self.upload is not None and self._report is not None and self in logger.destinations:
            logger.call(self, self._write)
            logger.flush()
            if self.path is not None and self.path.exists():
                logger.upload_file(self.upload.format(run_name=state.run_name), self.path, overwrite=True)

    def post_close(self) -> None:
        """Write the last version."""
        logging.getLogger("hocket").removeHandler(self._warnings)
        if self._report is not None:
            self._write()

    def note(self, text: str) -> None:
        """Add an event of your own to the report."""
        with self._lock:
            self._events.append((time.strftime("%Y-%m-%d %H:%M:%S"), self._batch, text))

    def _write_if_due(self, state: State, logger: Logger) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self.interval_s
            self._prepare(state, "Training goes on.")
            logger.call(self, self._write)

    def _prepare(self, state: State, outcome: str, error: BaseException | None = None) -> None:
        counts, duration = state.timestamp.counts, state.max_duration
        times = [Time(counts.epoch, "ep"), Time(counts.batch, "ba"), Time(counts.sample, "sp")]
        if counts.token:
            times.append(Time(counts.token, "tok"))
        trained = ", ".join(one.describe() for one in times)
        self._report = PageContents(
            run_name=state.run_name,
            outcome=outcome,
            has_failed=error is not None,
            facts={
                **self._facts,
                "trained": trained + ("" if duration is None else f", of {duration.describe()}"),
                "time": f"{describe_seconds(counts.total_wct)} of training",
                "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            },
            error="" if error is None else "".join(traceback.format_exception(error)),
        )

    def _write(self) -> None:
        report, path = self._report, self.path
        if report is None or path is None:
            return
        with self._lock:
            report.series = {name: series.points() for name, series in sorted(self._series.items())}
            report.events = list(self._events)
        report.units = {name: unit for name in report.series if (unit := self._unit_of(name))}
        report.hyperparameters = dict(self._hyperparameters)
        path.parent.mkdir(parents=True, exist_ok=True)
        part_path = path.with_name(path.name + ".part")
        part_path.write_text(render(report), encoding="utf-8")
        part_path.replace(path)  # a reader sees the old page or the new one, whole

    def _unit_of(self, metric: str) -> str:
        return next((unit for glob, unit in self._units.items() if fnmatchcase(metric, glob)), "")

    def state_dict(self) -> dict[str, Any]:
        """Return the curves, thinned, and the events."""
        if self._logger is not None:
            self._logger.flush(_FLUSH_TIMEOUT_S, to=self)
        with self._lock:
            series = {
                name: [list(point) for point in MetricSeries(_MAX_SAVED_POINTS, one.points()).points()]
                for name, one in self._series.items()
            }
            return {"series": series, "events": [list(event) for event in self._events]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the curves and events of a checkpoint."""
        with self._lock:
            self._series = {
                name: MetricSeries(_MAX_POINTS, [(int(step), float(value)) for step, value in points])
                for name, points in state.get("series", {}).items()
            }
            self._events.clear()
            for clock, batch, text in state.get("events", ()):
                self._events.append((str(clock), int(batch), str(text)))


class _WarningCollector(logging.Handler):
    """Adds warnings to a report's events."""

    def __init__(self, report: RunReport) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.note(f"{record.levelname.lower()}: {record.getMessage()}")
