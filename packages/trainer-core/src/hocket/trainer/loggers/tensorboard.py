"""A logger that writes files for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.trainer.capture import Number
from hocket.trainer.extras import import_extra
from hocket.trainer.logger import Logger, LoggerDestination

if TYPE_CHECKING:
    from hocket.trainer.state import State


class TensorboardLogger(LoggerDestination):
    """Writes TensorBoard event files, which `tensorboard --logdir DIR` shows. No service is needed.

    Needs the extra `tensorboard`.

    Args:
        log_dir: The folder; each run gets a folder named after it in there.
        flush_interval_s: How long points may wait in memory before they are written.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | Path = "tensorboard_logs", *, flush_interval_s: int = 10) -> None:
        import_extra("tensorboard", "tensorboard", needed_by="TensorboardLogger")
        self.log_dir = Path(log_dir)
        self.flush_interval_s = flush_interval_s
        self._writer: Any = None

    def init(self, state: State, logger: Logger) -> None:
        """Open the event file."""
        if self not in logger.destinations:
            return
        module = import_extra("torch.utils.tensorboard", "tensorboard", needed_by="TensorboardLogger")
        folder = str(self.log_dir / state.run_name)
        self._writer = module.SummaryWriter(log_dir=folder, flush_secs=self.flush_interval_s)

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Write scalars as scalars, lists as histograms, text as text."""
        for name, number in metrics.items():
            if isinstance(number, str):
                self._writer.add_text(name, number, step)
            elif isinstance(number, list):
                import torch

                self._writer.add_histogram(name, torch.tensor(number), step)
            else:
                self._writer.add_scalar(name, number, step)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Write the settings as a text, one a line."""
        self._writer.add_text(
            "hyperparameters", "  \n".join(f"{name}: {value}" for name, value in parameters.items())
        )

    def post_close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
