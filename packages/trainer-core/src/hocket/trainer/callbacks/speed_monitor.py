"""A callback that logs throughput."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.peak_flops import peak_flops
from hocket.trainer.callbacks.time_units import seconds_per
from hocket.trainer.checks import check_count, check_number
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.world import num_ranks
from hocket.trainer.timestamp import Counts

if TYPE_CHECKING:
    from hocket.trainer.state import State


class SpeedMonitor(Callback):
    """Logs the throughput of the training over a rolling window of batches.

    | name | meaning |
    |---|---|
    | `throughput/batches_per_sec`, `…/samples_per_sec`, `…/tokens_per_sec` | of all ranks |
    | `throughput/flops_per_sec` | of all ranks, if the model has `flops_per_batch` |
    | `throughput/device/…` | the same divided by the number of ranks |
    | `throughput/device/mfu` | the share of the device's peak that the model's operations use |
    | `time/train`, `time/val`, `time/total` | wall-clock time, over restarts |

    Throughput leaves evaluation out. All numbers come from host counts and clocks. `model.flops_per_batch` is
    a number, or a function of a rank's batch, for one batch of one rank, forward and backward.

    Args:
        window_size: Batches in the window.
        gpu_flops_available: The peak operations a second of one device; looked up by its name if None.
        time_unit: The unit of `time/*`: `"seconds"`, `"minutes"`, `"hours"` or `"days"`.

    Raises:
        TrainerConfigError: If an argument is out of range.
    """

    reads_outputs = False

    saves_rank_zero_state = True

    def __init__(
        self,
        window_size: int = 100,
        gpu_flops_available: float | None = None,
        time_unit: str = "hours",
    ) -> None:
        check_count("window_size", window_size)
        if gpu_flops_available is not None:
            check_number("gpu_flops_available", gpu_flops_available, least=1)
        self.window_size = window_size
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        self._unit_s = seconds_per(time_unit)
        self.metric_units = {
            "throughput/*_per_sec": "per second",
            **dict.fromkeys(("time/train", "time/val", "time/total"), time_unit),
        }
        self._peak: float | None = gpu_flops_available
        # One more than the window: a rate over n batches needs n + 1 points.
        self._window: deque[tuple[Counts, float]] = deque(maxlen=window_size + 1)
        self._flops = 0.0
        self._eval_s = 0.0
        self._eval_start_s = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Look up the device's peak."""
        if self._peak is None:
            self._peak = peak_flops(state.device, state.precision)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Start the clock of evaluation."""
        self._eval_start_s = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Stop the clock of evaluation."""
        self._eval_s += time.perf_counter() - self._eval_start_s

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates."""
        now: Counts = state.timestamp.counts
        window = self._window
        if window and window[-1][0].total_wct > now.total_wct:
            window.clear()  # the time was set back: the earlier counts belong to another training
        flops = self._count_flops(state)
        window.append((now, self._flops))
        metrics = {
            "time/train": now.total_wct / self._unit_s,
            "time/val": self._eval_s / self._unit_s,
            "time/total": (now.total_wct + self._eval_s) / self._unit_s,
        }
        then, flops_then = window[0]
        seconds = now.total_wct - then.total_wct
        if seconds > 0:
            rates = {
                "batches_per_sec": (now.batch - then.batch) / seconds,
                "samples_per_sec": (now.sample - then.sample) / seconds,
            }
            if now.token > then.token:
                rates["tokens_per_sec"] = (now.token - then.token) / seconds
            ranks = num_ranks()
            if flops is not None:
                # Tensor-parallel ranks compute a batch together.
                of_batch = (self._flops - flops_then) / seconds
                rates["flops_per_sec"] = total = of_batch * state.parallelism.data_parallel[1]
                if self._peak:
                    metrics["throughput/device/mfu"] = total / ranks / self._peak
            for name, rate in rates.items():
                metrics[f"throughput/{name}"] = rate
                metrics[f"throughput/device/{name}"] = rate / ranks
        logger.log_metrics(metrics)

    def _count_flops(self, state: State) -> float | None:
        """Add the operations of this rank's batch; return None if the model does not state them."""
        flops_per_batch: Any = getattr(getattr(state, "model", None), "flops_per_batch", None)
        if flops_per_batch is None:
            return None
        self._flops += float(flops_per_batch(state.batch) if callable(flops_per_batch) else flops_per_batch)
        return self._flops

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of evaluation; those of training are in the timestamp."""
        return {"eval_s": self._eval_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the seconds of evaluation."""
        self._eval_s = float(state.get("eval_s", 0.0))
