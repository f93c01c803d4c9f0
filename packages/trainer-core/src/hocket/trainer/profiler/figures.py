"""The numbers of one window of profiled steps, computed from its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.trainer.profiler.memory import MemoryTimeline, StepPhase, memory_timelines
from hocket.trainer.profiler.recorder import TraceEvent

Interval = tuple[float, float]

_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "ucc:", "mpi:")
# A synchronization in torch's own trace: the host waits for the device.
_SYNCS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The figures of one rank in one window, in seconds unless stated.

    Attributes:
        rank: The rank.
        steps: The duration of each step.
        phases: The time in each part of the steps, by name.
        listeners: The time in each algorithm, callback and logger, by name.
        data_wait: The time in which training waited for the data loader.
        window: The time that torch's profiler covers; 0 if it was off.
        has_device: Whether kernels of a GPU were recorded.
        busy: The time in which kernels (on a CPU: operators) ran.
        num_launches: The number of kernels (on a CPU: outermost operators).
        communication: The time in which collectives ran.
        exposed_communication: The part of `communication` during which nothing else ran.
        num_syncs: The number of times at which the host waited for the device or read a tensor's value.
        memory: The memory timelines; empty without `profile_memory`.
    """

    rank: int = 0
    steps: Sequence[float] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    listeners: Mapping[str, float] = field(default_factory=dict)
    data_wait: float = 0.0
    window: float = 0.0
    has_device: bool = False
    busy: float = 0.0
    num_launches: int = 0
    communication: float = 0.0
    exposed_communication: float = 0.0
    num_syncs: int = 0
    memory: Sequence[MemoryTimeline] = ()

    @property
    def total(self) -> float:
        """The duration of all steps together."""
        return sum(self.steps)


def compute_figures(
    events: Sequence[TraceEvent], content: Mapping[str, Any] | None = None, *, rank: int = 0
) -> RankFigures:
    """Compute the figures of one window.

    Args:
        events: The profiler's own records.
        content: The trace of torch's profiler of the same window; None if it was off.
        rank: The rank that made the records.
    """
    phases: defaultdict[str, float] = defaultdict(float)
    listeners: defaultdict[str, float] = defaultdict(float)
    steps: list[float] = []
    data_wait = 0.0
    for event in events:
        if event.duration_ns is None:
            continue
        duration = event.duration_ns / 1e9
        if event.category == "step":
            steps.append(duration)
        elif event.category == "data":
            data_wait += duration
        elif event.category == "phase":
            phases[event.name] += duration
        elif event.category in ("algorithm", "callback", "logger"):
            listeners[event.name.partition(".")[0]] += duration
    base: dict[str, Any] = {
        "rank": rank,
        "steps": tuple(steps),
        "phases": dict(phases),
        "listeners": dict(listeners),
        "data_wait": data_wait,
    }
    if content is None:
        return RankFigures(**base)
    return RankFigures(**base, **_of_torch(content, events))


def _of_torch(content: Mapping[str, Any], events: Sequence[TraceEvent]) -> dict[str, Any]:
    base_us = int(content.get("baseTimeNanoseconds", 0)) / 1000
    phases = [
        StepPhase(event.name, event.start_ns / 1000 - base_us, event.end_ns / 1000 - base_us)
        for event in events
        if event.category == "phase"
    ]
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    has_device = any(event.get("cat") in _DEVICE_WORK for event in spans)
    work: list[Interval] = []
    communication: list[Interval] = []
    window: list[Interval] = []
    num_launches = num_syncs = 0
    for event in spans:
        category, name = event.get("cat"), event["name"]
        interval = (event["ts"], event["ts"] + event["dur"])
        is_communication = name.startswith(_COMMUNICATION)
        if name.startswith("ProfilerStep#"):
            window.append(interval)
        elif is_communication and (not has_device or category in _DEVICE_WORK):
            communication.append(interval)
        elif category in (_DEVICE_WORK if has_device else ("cpu_op",)):
            work.append(interval)
            num_launches += has_device
        num_syncs += name.startswith(_SYNCS)
    busy = union(work)
    exchanged = union(communication)
    covered = union(window)
    return {
        "window": length(covered) / 1e6,
        "has_device": has_device,
        "busy": length(intersection(busy, covered)) / 1e6,
        "num_launches": num_launches or len(busy),
        "communication": length(exchanged) / 1e6,
        "exposed_communication": (length(exchanged) - length(intersection(exchanged, busy))) / 1e6,
        "num_syncs": num_syncs,
        "memory": memory_timelines(content, phases),
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint intervals in order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common
