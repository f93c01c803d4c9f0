"""A logger that writes event files for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.trainer.checks import check_number, local_path
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.process.extras import import_extra, require_extra
from hocket.trainer.process.world import global_rank

if TYPE_CHECKING:
    from hocket.trainer.state import State


class TensorboardLogger(LoggerDestination):
    """Writes TensorBoard event files, which `tensorboard --logdir DIR` shows. No service is needed.

    Needs the extra `tensorboard`.

    Args:
        log_dir: The folder; each run gets a subfolder of its name.
        flush_interval: Seconds that points may wait in memory before they are written.
        rank_zero_only: Whether only rank 0 writes. When False every rank has a subfolder of its own.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """

    reads_outputs = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "tensorboard_logs",
        flush_interval: int = 10,
        rank_zero_only: bool = True,
    ) -> None:
        check_number("flush_interval", flush_interval, least=0)
        require_extra("tensorboard", "tensorboard", needed_by="TensorboardLogger")
        self.log_dir = Path(local_path("log_dir", log_dir))
        self.flush_interval = flush_interval
        self.rank_zero_only = rank_zero_only
        self._writer: Any = None

    def init(self, state: State, logger: Logger) -> None:
        """Open the event file."""
        if self not in logger.destinations:
            return
        module = import_extra("torch.utils.tensorboard", "tensorboard", needed_by="TensorboardLogger")
        folder = self.log_dir / state.run_name
        if not self.rank_zero_only:
            folder = folder / f"rank{global_rank()}"
        self._writer = module.SummaryWriter(log_dir=str(folder), flush_secs=self.flush_interval)

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Write scalars as scalars, lists as histograms, text as text."""
        for name, number in metrics.items():
            if isinstance(number, str):
                self._writer.add_text(name, number, step)
            elif isinstance(number, list):
                import torch

                self._writer.add_histogram(name, torch.tensor(number, device="cpu"), step)
            else:
                self._writer.add_scalar(name, number, step)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Write the settings as a text, one on each line."""
        self._writer.add_text(
            "hyperparameters", "  \n".join(f"{name}: {value}" for name, value in parameters.items())
        )

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Write the table as Markdown text."""
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[str(value).replace("|", "\\|").replace("\n", " ") for value in line] for line in lines]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Write each image under `<name>/<index>`, and its masks beside it in grey."""
        for index, image in enumerate(images.images):
            self._writer.add_image(f"{name}/{index}", image, step, dataformats="HWC")
            for mask, parts in images.masks.items():
                classes = max(1, int(parts[index].max()))
                grey = (parts[index] * (255 // classes)).to(image.dtype)[..., None]
                self._writer.add_image(f"{name}/{index}/{mask}", grey, step, dataformats="HWC")

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Write the reports as texts."""
        for name, trace in traces.items():
            self._writer.add_text(f"trace/{name}", str(trace))

    def post_close(self) -> None:
        """Write the remaining points and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
