"""A callback that names the rank that the others wait for."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.rank_values import DelayedRows, RankValues
from hocket.trainer.callbacks.time_units import batches_between
from hocket.trainer.checks import check_number
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)
_PARTS = ("data", "forward")
_HOST_CHARS = 48


class StragglerReport(Callback):
    """Compares the ranks' own work, and reports a rank that is much slower than the median.

    Ranks that train together take equally long for a step, because the fast ones wait in the gradients'
    reduction. The callback therefore compares the work that a rank does without the others: fetching data,
    and forward pass and loss, on CUDA by the device's clock. With sharded parameters the forward pass gathers
    parameters and so waits for other ranks too; then only a slow loader can be identified with certainty.

    Every `interval` batches, one small all-reduce gathers the times, which are read a batch later without
    waiting. The callback logs `straggler/slowest_rank`, `straggler/slowdown` (the slowest over the median)
    and `straggler/median_seconds` for a step; beyond `threshold` a warning names rank, host and part.

    Args:
        interval: Batches between two comparisons, over which times are averaged.
        threshold: Multiple of the median above which a rank's work is reported.

    Raises:
        TrainerConfigError: If an argument is out of range.
    """

    reads_outputs = False
    metric_units = MappingProxyType({"straggler/*_seconds": "seconds"})

    def __init__(self, interval: TimeInput = "50ba", threshold: float = 1.3) -> None:
        self.interval = batches_between(interval)
        check_number("threshold", threshold, least=1)
        if threshold == 1:
            raise TrainerConfigError(f"`threshold` is {threshold}; expected more than 1")
        self.threshold = threshold
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._since_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started: torch.cuda.Event | None = None
        self._hosts: RankValues | None = None
        self._logger: Logger | None = None
        self._reports = DelayedRows(self._report)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Exchange the host names."""
        self._logger = logger
        name = socket.gethostname().encode()[:_HOST_CHARS].ljust(_HOST_CHARS)
        self._hosts = RankValues(state.parallelism, [float(byte) for byte in name])

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock of data."""
        self._since_s = time.perf_counter()

    def before_forward(self, state: State, logger: Logger) -> None:
        """Stop the clock of data, and start that of the forward pass."""
        self._stop("data")
        if state.device.type == "cuda":
            self._started = _event()

    def after_loss(self, state: State, logger: Logger) -> None:
        """Stop the clock of the forward pass."""
        if self._started is not None:
            self._events.append((self._started, _event()))
            self._started, self._since_s = None, 0.0
        else:
            self._stop("forward")

    def after_backward(self, state: State, logger: Logger) -> None:
        """Start the clock of data: the next batch is fetched now, unless a further microbatch follows."""
        self._since_s = time.perf_counter()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Stop the clock of data."""
        self._stop("data")
        self._since_s = 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        """Compare, if it is time."""
        batch = state.timestamp.counts.batch
        if batch % self.interval:
            self._reports.flush()
            return
        # Pairs that the device has not reached yet count in the next comparison.
        done = [pair for pair in self._events if pair[1].query()]  # type: ignore[no-untyped-call]  # of torch
        self._events = [pair for pair in self._events if pair not in done]
        self._seconds["forward"] += sum(begin.elapsed_time(end) for begin, end in done) / 1e3
        mean = [seconds / self.interval for seconds in self._seconds.values()]
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._reports.push(RankValues(state.parallelism, mean), batch)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Report the last comparison."""
        self._reports.flush()

    def _stop(self, part: str) -> None:
        now_s = time.perf_counter()
        if self._since_s:
            self._seconds[part] += now_s - self._since_s
        self._since_s = now_s

    def _report(self, rows: list[list[float]], batch: int) -> None:
        totals = [sum(row) for row in rows]
        slowest = max(range(len(rows)), key=totals.__getitem__)
        median = statistics.median_low(totals)
        slowdown = totals[slowest] / max(median, 1e-12)
        assert self._logger is not None
        self._logger.log_metrics(
            {
                "straggler/slowest_rank": slowest,
                "straggler/slowdown": slowdown,
                "straggler/median_seconds": median,
            },
            step=batch,
        )
        if len(rows) > 1 and slowdown > self.threshold:
            part_index = max(
                range(len(_PARTS)), key=lambda index: rows[slowest][index] - _median_of(rows, index)
            )
            _log.warning(
                "rank %d on `%s` is slow: its own work takes %.1f ms a step, %.1f times the median of "
                "%d ranks, most of the difference in %s (%.1f ms, median %.1f ms); batches %d to %d",
                slowest,
                self._host(slowest),
                1e3 * totals[slowest],
                slowdown,
                len(rows),
                _PARTS[part_index],
                1e3 * rows[slowest][part_index],
                1e3 * _median_of(rows, part_index),
                batch - self.interval + 1,
                batch,
            )

    def _host(self, rank: int) -> str:
        assert self._hosts is not None
        return bytes(int(byte) for byte in self._hosts.read()[rank]).decode(errors="replace").strip()


def _median_of(rows: list[list[float]], index: int) -> float:
    return statistics.median_low([row[index] for row in rows])


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch
    event.record()
    return event
