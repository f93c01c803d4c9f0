"""A logger that writes JSON lines."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hocket.trainer.checks import local_path
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.process.world import global_rank

if TYPE_CHECKING:
    from hocket.trainer.state import State


# `json.dumps` makes an encoder at each call that has options.
_encode = json.JSONEncoder(default=str).encode


@lru_cache(4096)
def _encode_name(name: str) -> str:
    return _encode({name: 0})[1:-2]


def _encode_points(step: int, points: Mapping[str, Number]) -> str:
    """Return the JSON of a line, equal to that of `_encode`, in half the time if the points are floats."""
    if "step" in points:
        return _encode({"step": step, **points})
    line = f'{{"step": {step}'
    for name, number in points.items():
        # The `repr` of a finite float is JSON; that of any other float ends in `nan` or `inf`.
        if type(number) is not float or (text := repr(number))[-1] in "nf":
            text = _encode(number)
        line = f"{line}, {_encode_name(name)}{text}"
    return line + "}"


class FileLogger(LoggerDestination):
    """Writes one JSON object a line: `{"step": 12, "loss/train/total": 2.31}`.

    Settings are a line `{"hyperparameters": {…}}`, tables `{"step": 12, "table": …}`. A number that is not
    finite is written as Python's `json` does: `NaN`, `Infinity`. Lines are handed to the operating system
    within a tenth of a second and from then on survive a killed process. A file that exists is continued: a
    resumed run adds to the log of the run before. Steps after the checkpoint then appear twice, and the later
    line counts. An exception that ends the run is written as a line `{"error": "Traceback …"}`.

    Args:
        filename: The file; `{run_name}` and `{rank}` are replaced. Without `{rank}`, only rank 0 writes.
        overwrite: Whether to empty a file that exists.
        remote_file_name: The name to upload the file under to loggers that keep files, when the trainer
            closes; None for no upload.
        capture_stdout: Whether to write the standard output of the process as lines `{"stdout": …}`.
        capture_stderr: The same for standard error.
        log_traces: Whether to write reports of algorithms.

    Example:
        >>> trainer = Trainer(..., loggers=[FileLogger("logs/{run_name}.jsonl")])  # doctest: +SKIP
    """

    reads_outputs = False
    shares_thread = True

    def __init__(
        self,
        filename: str | os.PathLike[str] = "{run_name}/logs-rank{rank}.txt",
        *,
        overwrite: bool = False,
        remote_file_name: str | None = None,
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        log_traces: bool = True,
    ) -> None:
        self.filename = local_path("filename", filename)
        self.overwrite = overwrite
        self.remote_file_name = remote_file_name
        self.rank_zero_only = "{rank}" not in self.filename
        self.path: Path | None = None
        """The file, from `INIT` on."""
        self._captures = {"stdout": capture_stdout, "stderr": capture_stderr}
        self._writes_traces = log_traces
        self._tees: list[tuple[str, _StreamTee]] = []
        self._file: IO[str] | None = None
        # Printed lines come from other threads than the logger's.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: an open file and a lock cannot go into another process.

        Raises:
            TypeError: The file is open.
        """
        if self._file is not None:
            raise TypeError(
                f"`FileLogger` has `{self.path}` open and cannot be copied or pickled; copy or pickle it "
                "before it is given to a trainer, or make a new one"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the settings over."""
        self.__dict__.update(state, _lock=threading.Lock())

    def init(self, state: State, logger: Logger) -> None:
        """Open the file."""
        if self not in logger.destinations:
            return
        self.path = Path(self.filename.format(run_name=state.run_name, rank=global_rank()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w" if self.overwrite else "a+", encoding="utf-8")
        if not self.overwrite and not _ends_with_newline(self.path):
            # A killed process may have left half a line behind; the next line must not be joined to it.
            self._file.write("\n")
        for name, is_captured in self._captures.items():
            if is_captured:
                tee = _StreamTee(getattr(sys, name), partial(self._write_printed, name))
                self._tees.append((name, tee))
                setattr(sys, name, tee)

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Write one line."""
        self._write_line(_encode_points(step, metrics))

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Write one line; a setting that JSON cannot represent is written as its text."""
        self._write({"hyperparameters": parameters})

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Write one line."""
        self._write({"step": step, "table": name, "columns": list(columns), "rows": [[*row] for row in rows]})

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Write one line, if `log_traces` is set."""
        if self._writes_traces:
            self._write({"traces": dict(traces)})

    def close(self, state: State, logger: Logger) -> None:
        """Stop capturing, write the exception that ends the run, and upload the file if asked to."""
        for name, tee in self._tees:
            if getattr(sys, name) is tee:
                setattr(sys, name, tee.stream)
            tee.is_open = False
        self._tees.clear()
        if self._file is not None and (error := sys.exception()) is not None:
            logger.flush(to=self)
            self._write({"error": "".join(traceback.format_exception(error))})
            self.after_delivery()
        if self.remote_file_name is not None and self.path is not None:
            logger.flush(to=self)
            remote = self.remote_file_name.format(run_name=state.run_name, rank=global_rank())
            logger.upload_file(remote, self.path, overwrite=True)

    def post_close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        self._write_line(_encode(record))

    def _write_line(self, line: str) -> None:
        if self._file is None:
            raise RuntimeError(f"`{self.filename}` is not open; `init` opens it, when a `Trainer` is made")
        with self._lock:
            self._file.write(line + "\n")

    def after_delivery(self) -> None:
        """Flush to the operating system; lines that arrived together go in one write."""
        with self._lock:
            if self._file is not None:
                self._file.flush()

    def _write_printed(self, name: str, line: str) -> None:
        if self._file is not None:
            self._write({name: line})
            self.after_delivery()


class _StreamTee(io.TextIOBase):
    """A stream that forwards all text to another stream, and complete lines to a function."""

    def __init__(self, stream: Any, write_line: partial[None]) -> None:
        self.stream = stream
        self.is_open = True
        self._write_line = write_line
        self._part = ""

    def write(self, text: str) -> int:
        """Forward the text to the stream, and its complete lines to the function."""
        self.stream.write(text)
        if self.is_open:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                self._write_line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        return bool(self.stream.isatty())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
