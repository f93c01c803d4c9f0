"""A callback that explains an out-of-memory error."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.memory_snapshot import start_recording, stop_recording, write_snapshot
from hocket.trainer.checks import check_count, local_path
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.devices import is_out_of_memory
from hocket.trainer.process.world import global_rank
from hocket.trainer.step.memory_report import memory_report

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)


class OOMObserver(Callback):
    """Adds a report of memory use and settings to change to an out-of-memory error, and writes a snapshot.

    The report becomes a note of the error and the file `<filename>.txt`. On CUDA the allocator's history up
    to the error is written as well, as a pickle for https://pytorch.org/memory_viz and an HTML page;
    recording it costs a few percent of speed.

    Args:
        max_entries: Allocations and frees to keep.
        folder: The folder; `{run_name}` is replaced.
        filename: The files' name without an ending; `{rank}` is replaced.
        remote_file_name: The name to upload the files under to loggers that keep files; None for no upload.
        overwrite: Whether to replace files that exist.
    """

    reads_outputs = False

    def __init__(
        self,
        max_entries: int = 100_000,
        folder: str | os.PathLike[str] = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = None,
        overwrite: bool = False,
    ) -> None:
        check_count("max_entries", max_entries)
        self.max_entries = max_entries
        self.folder = local_path("folder", folder)
        self.filename = local_path("filename", filename)
        self.remote_file_name = remote_file_name
        self.overwrite = overwrite
        self._is_recording = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start recording, on CUDA."""
        if state.device.type == "cuda" and not self._is_recording:
            start_recording(self.max_entries)
            self._is_recording = True

    def close(self, state: State, logger: Logger) -> None:
        """Report, if the training ends with an out-of-memory error."""
        error = sys.exception()
        try:
            if error is not None and is_out_of_memory(error):
                self._report(error, state, logger)
        finally:
            if self._is_recording:
                self._is_recording = False
                stop_recording()

    def _report(self, error: BaseException, state: State, logger: Logger) -> None:
        report = memory_report(state)
        error.add_note(report)
        names = {"run_name": state.run_name, "rank": global_rank()}
        path = Path(self.folder.format(**names), self.filename.format(**names) + ".txt")
        try:
            if path.exists() and not self.overwrite:
                raise FileExistsError(f"`{path}` exists; pass `overwrite=True` to replace it")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{error}\n\n{report}\n")
            paths = [path]
            if self._is_recording:
                paths += write_snapshot(path.with_suffix(".pickle"), overwrite=self.overwrite)
            if self.remote_file_name is not None:
                for file in paths:
                    remote = self.remote_file_name.format(**names) + file.suffix
                    logger.upload_file(remote, file, overwrite=self.overwrite)
            error.add_note(f"written to `{path}`")
        except OSError as failure:
            # A failure to write the report must not hide the error that ends the training.
            _log.warning("`OOMObserver` could not write its report: %s", failure)
