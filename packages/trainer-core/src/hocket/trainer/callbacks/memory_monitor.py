"""A callback that logs memory use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.callbacks.rank_values import RankValues
from hocket.trainer.checks import check_count
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State

_GIGA = 1e9
_KEYS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


class MemoryMonitor(Callback):
    """Logs the use of memory after each batch, in gigabytes (10⁹ bytes).

    On CUDA, the counters of torch's allocator are logged as `memory/current_allocated_mem`,
    `memory/peak_reserved_mem` and so on, and `memory/alloc_retries`; they are host counters, so nothing waits
    for the device. On every device, `memory/host_rss_mem` is the resident memory of this rank's process.

    Args:
        memory_keys: Names to log by keys of `torch.cuda.memory_stats`, in place of the default ones.
        dist_aggregate_batch_interval: Batches between two logs of minimum, maximum and mean over the ranks,
            as `<name>_min`, `_max` and `_avg`; None for never.

    Raises:
        TrainerConfigError: If the interval is below 1; if a key is none of `torch.cuda.memory_stats`, at the
            first batch.
    """

    reads_outputs = False

    def __init__(
        self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: int | None = None
    ) -> None:
        self.memory_keys = dict(_KEYS if memory_keys is None else memory_keys)
        in_bytes = [name for key, name in self.memory_keys.items() if "bytes" in key]
        self.metric_units = {f"memory/{name}*": "GB" for name in [*in_bytes, "host_rss_mem"]}
        if dist_aggregate_batch_interval is not None:
            check_count("dist_aggregate_batch_interval", dist_aggregate_batch_interval)
        self.dist_aggregate_batch_interval = dist_aggregate_batch_interval

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log this rank's memory and, at the interval, that of all ranks."""
        used = self._read(state.device)
        logger.log_metrics({f"memory/{name}": number for name, number in used.items()})
        interval = self.dist_aggregate_batch_interval
        if interval is not None and state.timestamp.counts.batch % interval == 0:
            values = RankValues(state.parallelism, list(used.values()))
            for index, name in enumerate(used):
                logger.log_metrics(
                    {
                        f"memory/{name}_min": _RankReduction(values, index, min),
                        f"memory/{name}_max": _RankReduction(values, index, max),
                        f"memory/{name}_avg": _RankReduction(values, index, _mean),
                    }
                )

    def _read(self, device: torch.device) -> dict[str, float]:
        used: dict[str, float] = {}
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            for key, name in self.memory_keys.items():
                if stats and key not in stats:
                    raise TrainerConfigError(f"`{key}` is not a key of `torch.cuda.memory_stats`")
                number = stats.get(key, 0)
                used[name] = number / _GIGA if "bytes" in key else number
        used["host_rss_mem"] = _resident_bytes() / _GIGA
        return used


class _RankReduction:
    """A number reduced over the ranks; read by the logger's thread."""

    def __init__(self, values: RankValues, index: int, reduce: Callable[[list[float]], float]) -> None:
        self._values, self._index, self._reduce = values, index, reduce

    def wait(self) -> float:
        """Wait for the numbers of all ranks and return the reduced one."""
        column = [row[self._index] for row in self._values.read()]
        return self._reduce(column)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # no /proc on this system
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
