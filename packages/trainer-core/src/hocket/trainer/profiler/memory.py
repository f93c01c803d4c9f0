"""The memory timeline of a profile: allocations over time, and those alive at the peak."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hocket.trainer.profiler.json_trace import write_json

_WIDTH, _HEIGHT, _MAX_POINTS = 960, 260, 1500
_COLORS = {"forward": "#cfe3f5", "loss": "#e3d5f0", "backward": "#f8dccb", "optimizer": "#d7ecd0"}


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A part of a step, in microseconds of the profile's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class LiveMemory:
    """Allocations of one kind that were alive at the peak."""

    phase: str
    operator: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The allocations of one device since the start of the profile.

    Attributes:
        device: `"cpu"` or a device such as `"cuda:0"`.
        points: Pairs of microseconds and allocated bytes, after each allocation and each release. Memory that
            was allocated before the profile started is not counted.
        peak: The point with the most bytes.
        phases: The parts of the steps.
        live_at_peak: The allocations alive at the peak, the largest first.
    """

    device: str
    points: Sequence[tuple[float, int]]
    peak: tuple[float, int]
    phases: Sequence[StepPhase]
    live_at_peak: Sequence[LiveMemory]

    def phase_at(self, time_us: float) -> str:
        """Return the name of the phase at a time; `"other"` between phases."""
        return next((p.name for p in self.phases if p.start_us <= time_us < p.end_us), "other")


def memory_timelines(content: Mapping[str, Any], phases: Sequence[StepPhase]) -> list[MemoryTimeline]:
    """Read the timelines of all devices from a trace of torch's profiler with `profile_memory`.

    Args:
        content: The trace, as torch's profiler wrote it.
        phases: The parts of the steps, on the trace's clock.
    """
    operators = _OperatorLookup(content["traceEvents"])
    by_device: dict[str, list[dict[str, Any]]] = {}
    for event in content["traceEvents"]:
        if event.get("name") == "[memory]":
            args = event["args"]
            device = "cpu" if args["Device Type"] == 0 else f"cuda:{args['Device Id']}"
            by_device.setdefault(device, []).append(event)
    return [_timeline(device, events, phases, operators) for device, events in sorted(by_device.items())]


def write_memory_timeline(path: Path, timelines: Sequence[MemoryTimeline], title: str) -> None:
    """Write timelines as a page (`.html`), or as data (`.json`, `.json.gz`)."""
    if path.name.endswith((".json", ".json.gz")):
        write_json(path, [asdict(timeline) for timeline in timelines])
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(map(_section, timelines)) or "<p>No allocation was recorded.</p>"
    style = (
        "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}td.n{text-align:right}"
    )
    escaped = html.escape(title)
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{escaped}</title><style>{style}</style>"
        f"<h1>{escaped}</h1>{body}",
        encoding="utf-8",
    )


def show_bytes(num_bytes: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


class _OperatorLookup:
    """The operators that ran on each thread, for a lookup by time."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._by_thread: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            if event.get("cat") == "cpu_op":
                span = (event["ts"], event["ts"] + event["dur"], event["name"])
                self._by_thread.setdefault(event["tid"], []).append(span)
        for spans in self._by_thread.values():
            spans.sort()

    def at(self, times: Sequence[tuple[float, Any]]) -> list[str]:
        """Return the outermost operator at each (time, thread), with the times in order."""
        next_index: Counter[Any] = Counter()
        operators = []
        for time_us, thread in times:
            spans = self._by_thread.get(thread, [])
            # The times are in order, so each operator that has ended is skipped only once.
            while next_index[thread] < len(spans) and spans[next_index[thread]][1] < time_us:
                next_index[thread] += 1
            index = next_index[thread]
            is_inside = index < len(spans) and spans[index][0] <= time_us
            operators.append(spans[index][2] if is_inside else "outside of operators")
        return operators


def _timeline(
    device: str, events: list[dict[str, Any]], phases: Sequence[StepPhase], operators: _OperatorLookup
) -> MemoryTimeline:
    events.sort(key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)))
    points: list[tuple[float, int]] = []
    total = 0
    for event in events:
        total += event["args"]["Bytes"]
        points.append((event["ts"], total))
    peak_index = max(range(len(points)), key=lambda index: points[index][1])
    timeline = MemoryTimeline(device, points, points[peak_index], phases, ())
    names = operators.at([(event["ts"], event["tid"]) for event in events[: peak_index + 1]])
    live: dict[int, tuple[str, str, int]] = {}
    for event, name in zip(events, names, strict=False):
        args = event["args"]
        if args["Bytes"] > 0:
            live[args["Addr"]] = (timeline.phase_at(event["ts"]), name, args["Bytes"])
        else:
            live.pop(args["Addr"], None)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for phase, name, num_bytes in live.values():
        counts[phase, name] += 1
        sizes[phase, name] += num_bytes
    largest = [LiveMemory(*key, counts[key], size) for key, size in sizes.most_common()]
    return MemoryTimeline(device, points, points[peak_index], phases, largest)


def _section(timeline: MemoryTimeline) -> str:
    start, end = timeline.points[0][0], max(timeline.points[-1][0], timeline.points[0][0] + 1)
    top = max(timeline.peak[1], 1)

    def x(time_us: float) -> float:
        return round((min(max(time_us, start), end) - start) / (end - start) * _WIDTH, 1)

    def y(num_bytes: float) -> float:
        return round(_HEIGHT * (1 - max(num_bytes, 0) / top), 1)

    bands = "".join(
        f'<rect x="{x(phase.start_us)}" width="{round(x(phase.end_us) - x(phase.start_us), 1)}" y="0" '
        f'height="{_HEIGHT}" fill="{_COLORS[phase.name]}"><title>{html.escape(phase.name)}</title></rect>'
        for phase in timeline.phases
        if phase.name in _COLORS and phase.end_us > start and phase.start_us < end
    )
    line = " ".join(f"{x(time)},{y(size)}" for time, size in _thinned(timeline.points))
    legend = " ".join(
        f'<span style="background:{color}">&nbsp;{name}&nbsp;</span>' for name, color in _COLORS.items()
    )
    rows = "".join(
        f"<tr><td>{html.escape(live.phase)}</td><td>{html.escape(live.operator)}</td>"
        f'<td class="n">{live.count}</td><td class="n">{show_bytes(live.num_bytes)}</td></tr>'
        for live in timeline.live_at_peak[:30]
    )
    return (
        f"<h2>{timeline.device}: peak {show_bytes(timeline.peak[1])} above the start, in "
        f"{html.escape(timeline.phase_at(timeline.peak[0]))}</h2><p>{legend}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" style="border:1px solid #999">{bands}'
        f'<polyline points="{line}" fill="none" stroke="#222"/>'
        f'<line x1="{x(timeline.peak[0])}" x2="{x(timeline.peak[0])}" y1="0" y2="{_HEIGHT}" stroke="#c00" '
        f'stroke-dasharray="4"/></svg><p>{(end - start) / 1e3:.1f} ms</p>'
        f"<h3>Alive at the peak</h3><table><tr><th>allocated in<th>by<th>tensors<th>size</tr>{rows}</table>"
    )


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most as many points as the page can show: the maximum of each stretch."""
    stride = -(-len(points) // _MAX_POINTS)
    return [max(points[i : i + stride], key=lambda point: point[1]) for i in range(0, len(points), stride)]
