"""A callback that records the history of the CUDA allocator."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.checks import check_count, local_path
from hocket.trainer.event import Event
from hocket.trainer.interval import every
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.world import global_rank
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)


class MemorySnapshot(Callback):
    """Records the history of the CUDA allocator for some batches, and writes it to a file.

    The file is a pickle for https://pytorch.org/memory_viz, beside an HTML page of the same name. Recording
    starts after `skip_batches` batches and lasts `interval`. Without CUDA nothing is recorded, and a warning
    is logged.

    Args:
        skip_batches: Batches to leave out first.
        interval: Length of the recording, such as `"3ba"`.
        max_entries: Allocations and frees to keep.
        folder: The folder; `{run_name}` is replaced.
        filename: The file's name; `{rank}` and `{batch}` are replaced.
        remote_file_name: The name to upload it under to loggers that keep files; None for no upload.
        overwrite: Whether to replace a file that exists.
    """

    reads_outputs = False

    def __init__(
        self,
        skip_batches: int = 1,
        interval: TimeInput = "3ba",
        max_entries: int = 100_000,
        folder: str | os.PathLike[str] = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot.pickle",
        remote_file_name: str | None = None,
        overwrite: bool = False,
    ) -> None:
        check_count("skip_batches", skip_batches, least=0)
        check_count("max_entries", max_entries)
        self.skip_batches = skip_batches
        self.max_entries = max_entries
        self.folder = local_path("folder", folder)
        self.filename = local_path("filename", filename)
        self.remote_file_name = remote_file_name
        self.overwrite = overwrite
        self._is_over = every(interval, include_end_of_training=True)
        self._is_recording = False
        self._is_done = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Warn if nothing can be recorded."""
        if state.device.type != "cuda":
            _log.warning("`MemorySnapshot` records CUDA's allocator; on `%s` it does nothing", state.device)
            self._is_done = True

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start recording, if it is time."""
        if self._is_done or self._is_recording:
            return
        if self.skip_batches > 0:
            self.skip_batches -= 1
            return
        start_recording(self.max_entries)
        self._is_recording = True

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the file, if it is time."""
        if self._is_recording and self._is_over(state, Event.BATCH_END):
            counts = state.timestamp.counts
            names = {"run_name": state.run_name, "rank": global_rank(), "batch": counts.batch}
            path = Path(self.folder.format(**names), self.filename.format(**names))
            for snapshot_path in write_snapshot(path, overwrite=self.overwrite):
                if self.remote_file_name is not None:
                    remote = self.remote_file_name.format(**names) + snapshot_path.suffix
                    logger.upload_file(remote, snapshot_path, overwrite=self.overwrite)
            self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """Stop recording, also after an error."""
        self._stop()

    def _stop(self) -> None:
        if self._is_recording:
            self._is_recording, self._is_done = False, True
            stop_recording()


def start_recording(max_entries: int) -> None:
    """Start to record the history of the CUDA allocator."""
    # Private by its name, but torch's documentation of memory use recommends it to users.
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_recording() -> None:
    """Stop recording and forget the history."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path, *, overwrite: bool) -> list[Path]:
    """Write the recorded history as a pickle and as an HTML page beside it; return both paths.

    Raises:
        FileExistsError: If the file exists and `overwrite` is False.
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"`{path}` exists; pass `overwrite=True`, or another `filename`")
    path.parent.mkdir(parents=True, exist_ok=True)
    snapshot: Any = torch.cuda.memory._snapshot()
    path.write_bytes(pickle.dumps(snapshot))
    from torch.cuda._memory_viz import trace_plot

    page = path.with_suffix(".html")
    page.write_text(trace_plot(snapshot))  # type: ignore[no-untyped-call]  # of torch
    return [path, page]
