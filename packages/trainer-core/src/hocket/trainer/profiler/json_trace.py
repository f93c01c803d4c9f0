"""Traces in Chrome's JSON format, one per rank, and their merging into one file."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.trainer.checks import check_count, local_path
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.profiler.recorder import TraceEvent

# Process ids of torch's traces are unique on one host only; this offset for each rank keeps hosts apart.
_PIDS_A_RANK = 10_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """The records of one rank from one window of active batches."""

    events: Sequence[TraceEvent]
    rank: int
    local_rank: int
    clock_offset_ns: int
    """The host's clock minus rank 0's."""
    names: Mapping[str, Any]
    """The fields of file names: `run_name`, `epoch`, `batch`, `rank` and so on."""
    torch_trace: Path | None = None
    """The file that torch's profiler wrote; None if it was off."""
    others: Sequence[Path] = field(default_factory=tuple)


class TraceHandler:
    """Receives the trace of each window of active batches."""

    def save(self, trace: Trace) -> Path | None:
        """Write one rank's trace; return the file, if it is to be merged."""
        return None

    def merge(self, paths: Sequence[Path], names: Mapping[str, Any]) -> None:
        """Combine the files of all ranks; called on rank 0 after every rank's `save`."""


class JSONTraceHandler(TraceHandler):
    """Writes traces that chrome://tracing and https://ui.perfetto.dev open.

    Every rank writes a file of its own. Rank 0 then merges the files that it can read, with the records of
    torch's profiler and with the hosts' clocks aligned; on several hosts this needs a shared folder.

    Args:
        folder: The folder; `{run_name}` and the other fields of `filename` are filled in.
        filename: The file of one rank, with the fields `{run_name}`, `{rank}`, `{local_rank}`,
            `{world_size}`, `{epoch}`, `{batch}` and `{batch_in_epoch}`.
        merged_trace_filename: The merged file, with the same fields; None for no merging.
        overwrite: Whether an existing file is replaced.
        num_traces_to_keep: The number of each rank's newest files to keep; -1 for all.

    Raises:
        FileExistsError: When a trace is due, if its file exists and `overwrite` is false.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/traces",
        filename: str = "ep{epoch}-ba{batch}-rank{rank}.json",
        *,
        merged_trace_filename: str | None = "merged_trace.json",
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
    ) -> None:
        if "{rank}" not in filename:
            raise TrainerConfigError(
                f"`filename` is `{filename}`, and every rank writes one; put `{{rank}}` into it"
            )
        self.folder = local_path("folder", folder)
        self.filename = local_path("filename", filename)
        self.merged_trace_filename = (
            None
            if merged_trace_filename is None
            else local_path("merged_trace_filename", merged_trace_filename)
        )
        self.overwrite = overwrite
        check_count("num_traces_to_keep", num_traces_to_keep, least=-1)
        self.num_traces_to_keep = num_traces_to_keep
        self.saved: list[Path] = []

    def save(self, trace: Trace) -> Path | None:
        """Write one rank's trace, with the records of torch's profiler."""
        path = Path(self.folder.format(**trace.names), self.filename.format(**trace.names))
        if path.exists() and not self.overwrite:
            raise FileExistsError(
                f"the trace `{path}` exists; pass `JSONTraceHandler(overwrite=True)`, or put "
                "`{run_name}` or `{batch}` into its name"
            )
        events = chrome_events(trace)
        if trace.torch_trace is not None:
            events += torch_events(read_json(trace.torch_trace), trace.rank, trace.clock_offset_ns)
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
        self.saved.append(path)
        if self.num_traces_to_keep >= 0:
            while len(self.saved) > self.num_traces_to_keep:
                self.saved.pop(0).unlink(missing_ok=True)
        return path if path.exists() else None

    def merge(self, paths: Sequence[Path], names: Mapping[str, Any]) -> None:
        """Merge the ranks' files of one window into the merged file, which the next window replaces."""
        if self.merged_trace_filename is not None:
            merged = Path(self.folder.format(**names), self.merged_trace_filename.format(**names))
            merge_traces(merged, paths)


def merge_traces(output: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> None:
    """Write one trace with the events of all the files, which are already on one clock."""
    events: list[Any] = []
    for path in paths:
        content = read_json(Path(path))
        events += content["traceEvents"] if isinstance(content, dict) else content
    write_json(Path(output), {"traceEvents": events, "displayTimeUnit": "ms"})


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Return a rank's own events in Chrome's format, on rank 0's clock, in microseconds."""
    pid = trace.rank
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {trace.rank}: training"}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": trace.rank}},
    ]
    for event in trace.events:
        common_fields = {
            "name": event.name,
            "cat": event.category,
            "pid": pid,
            "tid": event.thread,
            "ts": (event.start_ns - trace.clock_offset_ns) / 1000,
        }
        if event.is_counter:
            named.append({**common_fields, "ph": "C", "args": event.values})
        elif event.duration_ns is None:
            named.append({**common_fields, "ph": "i", "s": "t", "args": event.values})
        else:
            named.append({**common_fields, "ph": "X", "dur": event.duration_ns / 1000, "args": event.values})
    return named


def torch_events(content: Mapping[str, Any], rank: int, clock_offset_ns: int) -> list[dict[str, Any]]:
    """Return the events of torch's profiler on rank 0's clock, with process ids that no other rank has."""
    base_us = (int(content.get("baseTimeNanoseconds", 0)) - clock_offset_ns) / 1000
    shifted_events = []
    for event in content["traceEvents"]:
        shifted = dict(event)
        if "ts" in shifted:
            shifted["ts"] = shifted["ts"] + base_us
        if isinstance(shifted.get("pid"), int):
            shifted["pid"] += (rank + 1) * _PIDS_A_RANK
        if isinstance(shifted.get("id"), int):
            shifted["id"] += rank * _PIDS_A_RANK
        if shifted.get("ph") == "M" and shifted.get("name") == "process_name":
            shifted["args"] = {"name": f"rank {rank}: {shifted['args'].get('name')}"}
        shifted_events.append(shifted)
    return shifted_events


def read_json(path: Path) -> Any:
    """Read a JSON file, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; compressed if its name ends in `.gz`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(content).encode()
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    temporary.replace(path)
