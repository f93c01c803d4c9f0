"""Counters of the host, sampled on a thread of their own."""

from __future__ import annotations

import importlib.util
import threading
from types import ModuleType
from typing import Any

from hocket.trainer.process.extras import import_extra
from hocket.trainer.profiler.recorder import Recorder


def has_psutil() -> bool:
    """Return whether psutil is installed."""
    return importlib.util.find_spec("psutil") is not None


def _import_psutil() -> ModuleType:
    return import_extra("psutil", "system", needed_by="Profiler(sys_prof_*)")


class SystemSampler:
    """Records the use of processors, memory, disks and network at a fixed interval while a profile is active.

    Disks and network are rates since the previous sample, in bytes a second.

    Args:
        recorder: The recorder that stores the counters.
        cpu: Sample the host's and this process's use of processors, in percent.
        memory: Sample the host's memory and this process's resident set, in bytes.
        disk: Sample reads and writes of all disks.
        net: Sample the bytes sent and received.
        interval_s: Seconds between two samples.

    Raises:
        MissingExtraError: If psutil is not installed.
    """

    def __init__(
        self, recorder: Recorder, *, cpu: bool, memory: bool, disk: bool, net: bool, interval_s: float
    ) -> None:
        _import_psutil()
        self._recorder = recorder
        self._cpu, self._memory, self._disk, self._net = cpu, memory, disk, net
        self._interval_s = interval_s
        self._process: Any = None
        self._last: dict[str, dict[str, float]] = {}
        self._sampling: tuple[threading.Thread, threading.Event] | None = None

    def start(self) -> None:
        """Start the thread."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="hocket-profiler-system", daemon=True)
        self._sampling = thread, stop
        thread.start()

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        if self._sampling is not None:
            thread, stop = self._sampling
            stop.set()
            thread.join()
            self._sampling = None

    def sample(self) -> None:
        """Record one sample of every counter that is on."""
        psutil, counter = _import_psutil(), self._recorder.counter
        if self._process is None:
            self._process = psutil.Process()
        if self._cpu:
            counter(
                "cpu", {"host_percent": psutil.cpu_percent(), "process_percent": self._process.cpu_percent()}
            )
        if self._memory:
            memory = psutil.virtual_memory()
            resident = self._process.memory_info().rss
            counter("memory", {"host_used_bytes": memory.total - memory.available, "process_bytes": resident})
        if self._disk and (disk := psutil.disk_io_counters()) is not None:
            self._rates("disk", {"read_bytes": disk.read_bytes, "write_bytes": disk.write_bytes})
        if self._net:
            net = psutil.net_io_counters()
            self._rates("network", {"sent_bytes": net.bytes_sent, "received_bytes": net.bytes_recv})

    def _rates(self, name: str, totals: dict[str, float]) -> None:
        now = self._recorder.now_ns() / 1e9
        previous, self._last[name] = self._last.get(name), {**totals, "at": now}
        if previous is not None and now > previous["at"]:
            seconds = now - previous["at"]
            rates = {f"{key}_per_s": (total - previous[key]) / seconds for key, total in totals.items()}
            self._recorder.counter(name, rates)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            if self._recorder.is_active:
                self.sample()
