"""A callback that logs throughput."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.logger import Logger, num_ranks
from hocket.trainer.timestamp import Counts

if TYPE_CHECKING:
    from hocket.trainer.state import State


_SECONDS_OF = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


class SpeedMonitor(Callback):
    """Logs how many batches, samples and tokens a second are trained on, over a rolling window of batches.

    Logged each batch, from the second on: `throughput/batches_per_sec`, `throughput/samples_per_sec`,
    `throughput/tokens_per_sec` (where batches have tokens), the same under `throughput/device/` divided by
    the number of ranks, and `wall_clock/train`. All of it comes from host counts and clocks. Evaluation is
    left out.

    Args:
        window_size: Batches in the window.
        time_unit: What `wall_clock/*` is in: `"seconds"`, `"minutes"`, `"hours"` or `"days"`.
    """

    def __init__(self, window_size: int = 100, time_unit: str = "hours") -> None:
        if window_size < 1:
            raise ValueError(f"`window_size` is `{window_size}`; expected at least 1 batch")
        if time_unit not in _SECONDS_OF:
            raise ValueError(
                f"`time_unit` is `{time_unit}`; expected one of {', '.join(f'`{u}`' for u in _SECONDS_OF)}"
            )
        self.window_size = window_size
        self.time_unit = time_unit
        # One more than the window: a rate of n batches is between n + 1 points.
        self._window: deque[Counts] = deque(maxlen=window_size + 1)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates."""
        now: Counts = state.timestamp.counts
        window = self._window
        if window and window[-1].total_wct > now.total_wct:
            window.clear()  # the time was set back: the counts before are of another training
        window.append(now)
        metrics = {"wall_clock/train": now.total_wct / _SECONDS_OF[self.time_unit]}
        then = window[0]
        seconds = now.total_wct - then.total_wct
        if seconds > 0:
            rates = {
                "batches_per_sec": (now.batch - then.batch) / seconds,
                "samples_per_sec": (now.sample - then.sample) / seconds,
            }
            if now.token > then.token:
                rates["tokens_per_sec"] = (now.token - then.token) / seconds
            ranks = num_ranks()
            for name, rate in rates.items():
                metrics[f"throughput/{name}"] = rate
                metrics[f"throughput/device/{name}"] = rate / ranks
        logger.log_metrics(metrics)
