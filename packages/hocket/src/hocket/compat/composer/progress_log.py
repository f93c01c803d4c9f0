"""A callback that logs the progress of training as Composer's trainer does, under Composer's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hocket.trainer import Callback, Logger, State
from hocket.trainer.batches import num_samples


class ProgressLog(Callback):
    """A callback that logs `time/*`, `trainer/device_train_microbatch_size` and the parts of a dict loss.

    Each part is logged as `loss/train/<part>`, the mean over this rank's batch.
    """

    def __init__(self) -> None:
        self._parts: dict[str, torch.Tensor] = {}
        self._num_samples = 0

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Log the epoch."""
        logger.log_metrics({"time/epoch": state.timestamp.counts.epoch})

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the time and the size of a microbatch."""
        size = state.device_train_microbatch_size or getattr(state.dataloader, "batch_size", None)
        logger.log_metrics(
            _times(state) | ({} if size is None else {"trainer/device_train_microbatch_size": size})
        )

    def after_loss(self, state: State, logger: Logger) -> None:
        """Add the parts of a microbatch's loss."""
        loss: Any = state.loss
        if not isinstance(loss, Mapping):
            return
        rows = num_samples(state.batch)
        self._num_samples += rows
        for name, part in loss.items():
            if name != "total" and isinstance(part, torch.Tensor):
                added = part.detach() * rows
                self._parts[name] = self._parts[name] + added if name in self._parts else added

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the parts of the batch's loss."""
        if self._parts:
            logger.log_metrics(
                {f"loss/train/{name}": part / self._num_samples for name, part in self._parts.items()}
            )
            self._parts, self._num_samples = {}, 0

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the time at the end."""
        logger.log_metrics({"time/epoch": state.timestamp.counts.epoch} | _times(state))


def _times(state: State) -> dict[str, int]:
    counts = state.timestamp.counts
    names = ["batch", "batch_in_epoch", "sample", "sample_in_epoch"]
    names += ["token", "token_in_epoch"] if counts.token else []
    return {f"time/{name}": getattr(counts, name) for name in names}
