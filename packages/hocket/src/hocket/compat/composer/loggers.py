"""Loggers, as `composer.loggers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePath
from typing import Any, TextIO

from hocket.compat.composer.console_logger import ConsoleLogger, format_log_data_value
from hocket.compat.composer.engine import Logger
from hocket.compat.composer.in_memory_logger import InMemoryLogger
from hocket.compat.composer.spellings import translate
from hocket.compat.composer.trackers import MLFlowLogger, WandBLogger
from hocket.compat.composer.utils.uploads import RemoteUploaderDownloader
from hocket.trainer import LoggerDestination, State
from hocket.trainer.log.logger import Logger as _Logger
from hocket.trainer.loggers import (
    CometMLLogger,
    MosaicMLLogger,
    NeptuneLogger,
    SlackLogger,
    TensorboardLogger,
)
from hocket.trainer.loggers import FileLogger as _FileLogger
from hocket.trainer.loggers import ProgressBarLogger as _ProgressBarLogger
from hocket.trainer.process.world import global_rank


class FileLogger(_FileLogger):
    """`hocket.trainer.loggers.FileLogger` with Composer's arguments and defaults.

    Args:
        filename: The file. Without `{rank}`, ranks other than 0 add their number before the suffix.
        remote_file_name: The name to upload the file under.
        **arguments: Other arguments, and past ones. By default, standard output and error are captured.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        **arguments: Any,
    ) -> None:
        name = PurePath(filename)
        if "{rank}" not in str(name) and global_rank() != 0:
            name = name.with_name(f"{name.stem}-rank{{rank}}{name.suffix}")
        captured = {"capture_stdout": True, "capture_stderr": True}
        super().__init__(
            name, remote_file_name=remote_file_name, **captured | translate("FileLogger", arguments)
        )

    def init(self, state: State, logger: _Logger) -> None:
        """Open the file; if it continues the file of an earlier run, write a line that names this run."""
        path = Path(self.filename.format(run_name=state.run_name, rank=global_rank()))
        is_continued = not self.overwrite and path.is_file() and path.stat().st_size > 0
        super().init(state, logger)
        if is_continued and self.path is not None:
            self._write({"run_name": state.run_name})


class ProgressBarLogger(_ProgressBarLogger):
    """`hocket.trainer.loggers.ProgressBarLogger` with Composer's arguments.

    Args:
        stream: A stream, or `stdout` or `stderr`; standard error by default.
        log_traces: Accepted for Composer's users: traces are not shown beside the bar.
    """

    shares_thread = True

    def __init__(self, stream: str | TextIO | None = None, log_traces: bool = False) -> None:
        del log_traces
        streams: dict[Any, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        chosen: Any = streams.get(stream, stream)
        super().__init__(chosen)


#: The progress bar's past name.
TQDMLogger = ProgressBarLogger


__all__ = [
    "CometMLLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "MosaicMLLogger",
    "NeptuneLogger",
    "ProgressBarLogger",
    "RemoteUploaderDownloader",
    "SlackLogger",
    "TQDMLogger",
    "TensorboardLogger",
    "WandBLogger",
    "format_log_data_value",
]
