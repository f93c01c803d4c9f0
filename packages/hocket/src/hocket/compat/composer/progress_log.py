"""A callback that logs the progress of training as Composer's trainer does, under Composer's names."""

from __future__ import annotations

from hocket.trainer import Callback, Logger, State


class ProgressLog(Callback):
    """A callback that logs `time/*` and `trainer/device_train_microbatch_size`."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Log the epoch."""
        logger.log_metrics({"time/epoch": state.timestamp.counts.epoch})

    def batch_start(self, state: State, logger: Logger) -> None:
        """Log the time and the size of a microbatch."""
        size = state.device_train_microbatch_size or getattr(state.dataloader, "batch_size", None)
        logger.log_metrics(
            _times(state) | ({} if size is None else {"trainer/device_train_microbatch_size": size})
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the time at the end."""
        logger.log_metrics({"time/epoch": state.timestamp.counts.epoch} | _times(state))


def _times(state: State) -> dict[str, int]:
    counts = state.timestamp.counts
    names = ["batch", "batch_in_epoch", "sample", "sample_in_epoch"]
    names += ["token", "token_in_epoch"] if counts.token else []
    return {f"time/{name}": getattr(counts, name) for name in names}
