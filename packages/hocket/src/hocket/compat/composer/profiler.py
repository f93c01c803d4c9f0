"""The profiler, as `composer.profiler`."""

from __future__ import annotations

import os

from hocket.trainer import Callback, Logger, State
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.profiler import JSONTraceHandler as _JSONTraceHandler
from hocket.trainer.profiler import (
    Marker,
    ProfilerAction,
    TraceHandler,
    cyclic_schedule,
)
from hocket.trainer.profiler import Profiler as _Profiler
from hocket.trainer.profiler.system import SystemSampler
from hocket.trainer.profiler.torch_profiler import TorchProfilerConfig


class Profiler(_Profiler):
    """`hocket.trainer.profiler.Profiler`, which can be bound to a state without a trainer."""

    def bind_to_state(self, state: State) -> None:
        """Make this the state's profiler and one of its callbacks; a trainer does so by itself."""
        state.profiler = self
        state.callbacks.append(self)


class JSONTraceHandler(_JSONTraceHandler):
    """`hocket.trainer.profiler.JSONTraceHandler` with Composer's arguments.

    Args:
        folder: The folder of the traces.
        filename: File name of one rank's trace.
        remote_file_name: Accepted for Composer's users: loggers upload no traces.
        merged_trace_filename: The merged file; None for no merging.
        merged_trace_remote_file_name: Likewise.
        overwrite: Whether an existing file is replaced.
        num_traces_to_keep: The number of each rank's newest files to keep; -1 for all.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        remote_file_name: str | None = None,
        merged_trace_filename: str | None = "merged_trace.json",
        merged_trace_remote_file_name: str | None = None,
        *,
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
    ) -> None:
        del remote_file_name, merged_trace_remote_file_name
        super().__init__(
            folder,
            filename,
            merged_trace_filename=merged_trace_filename,
            overwrite=overwrite,
            num_traces_to_keep=num_traces_to_keep,
        )


class SystemProfiler(Callback):
    """A callback that adds counters of the host to the trace of `Trainer(profiler=…)`.

    `Profiler(sys_prof_cpu=True, …)` does the same.

    Args:
        profile_cpu: Sample the use of processors.
        profile_memory: Sample the host's memory.
        profile_disk: Sample disks.
        profile_net: Sample the network.
        stats_thread_interval_seconds: Seconds between two samples.
    """

    def __init__(
        self,
        profile_cpu: bool = True,
        profile_memory: bool = False,
        profile_disk: bool = False,
        profile_net: bool = False,
        stats_thread_interval_seconds: float = 0.5,
    ) -> None:
        self._chosen = {
            "cpu": profile_cpu,
            "memory": profile_memory,
            "disk": profile_disk,
            "net": profile_net,
        }
        self._interval_s = stats_thread_interval_seconds
        self._sampler: SystemSampler | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start sampling.

        Raises:
            TrainerConfigError: If the trainer has no profiler.
        """
        if state.profiler is None:
            raise TrainerConfigError(
                "`SystemProfiler` writes to the trace of a profiler, and there is none; set "
                "`Trainer(profiler=Profiler(…))`"
            )
        self._stop()
        self._sampler = SystemSampler(state.profiler.recorder, interval_s=self._interval_s, **self._chosen)
        self._sampler.start()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stop sampling."""
        self._stop()

    def close(self, state: State, logger: Logger) -> None:
        """Stop sampling, after a failure too."""
        self._stop()

    def _stop(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()


class TorchProfiler(Callback):
    """A callback that records torch's operators by the schedule of `Trainer(profiler=…)`.

    `Profiler(torch_prof_folder=…, …)` does the same; give the settings to one of them.

    Args:
        folder: The folder of the traces.
        filename: File name of the trace of one rank and window.
        remote_file_name: Accepted for Composer's users: loggers upload no traces.
        memory_filename: File name of a page that shows the memory over time.
        memory_remote_file_name: Likewise.
        overwrite: Whether an existing trace is replaced.
        use_gzip: Whether traces are compressed.
        record_shapes: Whether operators' shapes are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether Python stacks are recorded.
        with_flops: Whether floating-point operations are estimated.
        num_traces_to_keep: The number of newest traces to keep; -1 for all.
    """

    def __init__(
        self,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = None,
        memory_filename: str | None = None,
        memory_remote_file_name: str | None = None,
        overwrite: bool = False,
        use_gzip: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
        num_traces_to_keep: int = -1,
    ) -> None:
        del remote_file_name, memory_remote_file_name
        self.config, _ = TorchProfilerConfig(
            folder=folder,
            filename=filename,
            memory_filename=memory_filename,
            overwrite=overwrite,
            use_gzip=use_gzip,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            num_traces_to_keep=num_traces_to_keep,
        ).with_memory_needs()

    def init(self, state: State, logger: Logger) -> None:
        """Give the trainer's profiler these settings.

        Raises:
            TrainerConfigError: If the trainer has no profiler.
        """
        if state.profiler is None:
            raise TrainerConfigError(
                "`TorchProfiler` follows the schedule of a profiler, and there is none; set "
                "`Trainer(profiler=Profiler(…))`"
            )
        state.profiler.torch_config = self.config


__all__ = [
    "JSONTraceHandler",
    "Marker",
    "Profiler",
    "ProfilerAction",
    "SystemProfiler",
    "TorchProfiler",
    "TraceHandler",
    "cyclic_schedule",
]
