"""Profiling of a training: traces, memory, counters of the host, and a report in words."""

from hocket.trainer.checks import check_arguments
from hocket.trainer.profiler.json_trace import JSONTraceHandler, Trace, TraceHandler, merge_traces
from hocket.trainer.profiler.profiler import Profiler
from hocket.trainer.profiler.recorder import Marker
from hocket.trainer.profiler.report import Finding, ProfileReport
from hocket.trainer.profiler.schedule import ProfilerAction, cyclic_schedule
from hocket.trainer.profiler.torch_profiler import TorchProfilerConfig

__all__ = [
    "Finding",
    "JSONTraceHandler",
    "Marker",
    "ProfileReport",
    "Profiler",
    "ProfilerAction",
    "Trace",
    "TraceHandler",
    "cyclic_schedule",
    "merge_traces",
]

check_arguments([JSONTraceHandler])
check_arguments([Profiler], passed_on=TorchProfilerConfig.argument_names())
