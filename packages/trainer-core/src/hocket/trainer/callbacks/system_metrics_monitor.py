"""A callback that logs the load of the machine and its GPU."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import PeriodicCallback
from hocket.trainer.callbacks.rank_values import RankValues
from hocket.trainer.interval import IsTime
from hocket.trainer.log.logger import Logger
from hocket.trainer.process.extras import import_extra, require_extra
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State

_CPU_NAMES = (
    "cpu_percent",
    "cpu_memory_percent",
    "disk_read_mb",
    "disk_write_mb",
    "network_sent_mb",
    "network_received_mb",
)
_GPU_NAMES = ("gpu_percent", "gpu_memory_percent", "gpu_power_watts", "gpu_temperature_celsius")


class SystemMetricsMonitor(PeriodicCallback):
    """Logs the load of CPU, memory, disk, network and GPU: the least and most over the ranks, with the rank.

    The names are `system/<name>_min` and `_max`, with `_min_rank` and `_max_rank`. GPU numbers need an NVIDIA
    GPU. Disk and network are totals since the start of the run. The numbers of other ranks are gathered
    asynchronously. Needs the extra `system`.

    Args:
        log_all_data: Also log every rank's number, as `system/<name>_rank<r>`.
        interval: Time between two logs.

    Raises:
        MissingExtraError: If psutil is not installed.
    """

    reads_outputs = False
    metric_units = MappingProxyType(
        {"system/*_rank": "rank", "system/*_percent*": "%", "system/*_mb_*": "MB", "system/*_watts*": "W"}
        | {"system/*_celsius*": "°C"}
    )

    def __init__(self, log_all_data: bool = False, interval: TimeInput | IsTime = "10ba") -> None:
        super().__init__(interval)
        require_extra("psutil", "system", needed_by="SystemMetricsMonitor")
        self.log_all_data = log_all_data
        self._psutil: Any = None
        self._gpu: Any = None
        self._base: dict[str, float] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the counters."""
        self._psutil = import_extra("psutil", "system", needed_by="SystemMetricsMonitor")
        self._psutil.cpu_percent()  # the first call has no interval to measure
        self._base = self._totals()
        if state.device.type == "cuda" and self._gpu is None:
            self._gpu = _GpuCounters.open(state.device.index or 0)

    def act(self, state: State, logger: Logger) -> None:
        """Log the load."""
        values = RankValues(state.parallelism, self._read())
        ranks = state.parallelism.data_parallel[1]
        logged: dict[str, Any] = {}
        for index, name in enumerate(_CPU_NAMES + _GPU_NAMES):
            if name in _GPU_NAMES and state.device.type != "cuda":
                continue
            for kind in ("min", "max"):
                logged[f"system/{name}_{kind}"] = _RankExtreme(values, index, kind, is_rank=False)
                logged[f"system/{name}_{kind}_rank"] = _RankExtreme(values, index, kind, is_rank=True)
            if self.log_all_data:
                for rank in range(ranks):
                    logged[f"system/{name}_rank{rank}"] = _RankNumber(values, rank, index)
        logger.log_metrics(logged)

    def _read(self) -> list[float]:
        totals = self._totals()
        since_start = [totals[name] - self._base[name] for name in _CPU_NAMES[2:]]
        cpu = [float(self._psutil.cpu_percent()), float(self._psutil.virtual_memory().percent)]
        return [*cpu, *since_start, *(self._gpu.read() if self._gpu is not None else [0.0] * len(_GPU_NAMES))]

    def _totals(self) -> dict[str, float]:
        disk, network = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        # A container may show no disks or no network.
        numbers = [
            *((disk.read_bytes, disk.write_bytes) if disk else (0, 0)),
            *((network.bytes_sent, network.bytes_recv) if network else (0, 0)),
        ]
        return {name: number / 1e6 for name, number in zip(_CPU_NAMES[2:], numbers, strict=True)}

    def close(self, state: State, logger: Logger) -> None:
        """Close the GPU's counters."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None


class _GpuCounters:
    """The counters of one NVIDIA GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def open(cls, index: int) -> _GpuCounters | None:
        """Return the counters of the GPU `index`, or None without an NVIDIA driver."""
        pynvml: Any = import_extra("pynvml", "system", needed_by="SystemMetricsMonitor")
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:
            return None

    def read(self) -> list[float]:
        use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return [
            float(use.gpu),
            100.0 * memory.used / memory.total,
            self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            float(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)),
        ]

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class _RankExtreme:
    """The least or most of one number over the ranks, or the rank that has it."""

    def __init__(self, values: RankValues, index: int, kind: str, *, is_rank: bool) -> None:
        self._values, self._index, self._kind, self._is_rank = values, index, kind, is_rank

    def wait(self) -> float:
        column = [row[self._index] for row in self._values.read()]
        extreme = min(column) if self._kind == "min" else max(column)
        return float(column.index(extreme)) if self._is_rank else extreme


class _RankNumber:
    """One number of one rank."""

    def __init__(self, values: RankValues, rank: int, index: int) -> None:
        self._values, self._rank, self._index = values, rank, index

    def wait(self) -> float:
        return self._values.read()[self._rank][self._index]
