"""A callback that ends the training when the loss is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.rank_values import DelayedRows, RankValues
from hocket.trainer.errors import DivergedError
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class NaNMonitor(Callback):
    """Raises on every rank when the loss of any rank is NaN or infinite, and names the rank.

    Nothing waits for the device: the loss of a batch is checked when the next one has been computed, so the
    error comes one batch late, after the update. A checkpoint saved at the end of an epoch is saved after the
    check. On several ranks the check adds one small all-reduce for each batch.

    Raises:
        DivergedError: At the end of the next batch, or of the training.
    """

    reads_outputs = False

    def __init__(self) -> None:
        self._checks = DelayedRows(_raise_if_any)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Start the check of this batch, and finish that of the batch before."""
        if not isinstance(state.loss, torch.Tensor):
            return
        is_bad = (~torch.isfinite(state.loss.detach())).any().reshape(1)
        self._checks.push(RankValues(state.parallelism, is_bad.double()), state.timestamp.counts.batch)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Finish the last check of the epoch."""
        self._checks.flush()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Finish the last check."""
        self._checks.flush()


def _raise_if_any(rows: list[list[float]], batch: int) -> None:
    bad_ranks = [rank for rank, (is_bad,) in enumerate(rows) if is_bad]
    if bad_ranks:
        where = "" if len(rows) == 1 else f" on rank {', '.join(map(str, bad_ranks))} of {len(rows)}"
        raise DivergedError(
            f"the loss of batch {batch} is not finite{where}; go on from a checkpoint before it with a lower "
            "learning rate or clipped gradients, or look at that batch's data"
        )
