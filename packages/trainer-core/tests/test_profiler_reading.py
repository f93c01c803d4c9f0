"""Reading a profile: intervals, figures, memory and findings, from records with known content."""

from __future__ import annotations

import itertools
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.profiler import JSONTraceHandler, Marker, Profiler, ProfilerAction, Trace, cyclic_schedule
from hocket.trainer.profiler.figures import RankFigures, compute_figures, intersection, length, union
from hocket.trainer.profiler.memory import StepPhase, memory_timelines, write_memory_timeline
from hocket.trainer.profiler.recorder import Recorder, TraceEvent
from hocket.trainer.profiler.report import read_profile
from hocket.trainer.profiler.schedule import as_schedule
from hocket.trainer.timestamp import Timestamp

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=8)


def covered(pairs):
    return {point for start, end in pairs for point in range(start, end)}


@given(intervals, intervals)
def test_operations_on_intervals_equal_those_on_sets(first, second):
    a, b = union(first), union(second)
    assert covered(a) == covered(first)
    assert length(a) == len(covered(first))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(a))
    assert covered(intersection(a, b)) == covered(first) & covered(second)


def state(batch, profiler=None):
    return SimpleNamespace(timestamp=Timestamp(batch=batch), profiler=profiler)


counts = st.integers(0, 3)


@given(skip_first=counts, wait=counts, warmup=counts, active=st.integers(1, 3), repeat=counts, first=counts)
def test_cyclic_schedules_equal_torchs(skip_first, wait, warmup, active, repeat, first):
    ours = cyclic_schedule(skip_first, wait, warmup, active, repeat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of cycles without warmup
        torchs = as_schedule(
            torch.profiler.schedule(
                skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat
            )
        )
    profiler = SimpleNamespace(first_batch=first)
    for batch in range(first, first + 30):
        assert ours(state(batch, profiler)) is torchs(state(batch, profiler))


def test_invalid_schedules_raise():
    with pytest.raises(TrainerConfigError, match="`active` is 0"):
        cyclic_schedule(active=0)
    with pytest.raises(TrainerConfigError, match="`wait` is -1"):
        cyclic_schedule(wait=-1)
    with pytest.raises(TrainerConfigError, match="`schedule` is"):
        Profiler(schedule=3)


def test_markers_record_spans_and_instants():
    recorder = Recorder()
    marker = Marker(recorder, "work", categories=["a", "b"], record_instant_on_finish=True)
    with marker:
        pass
    assert recorder.take() == []
    recorder.action = ProfilerAction.ACTIVE
    with marker, marker:
        marker.instant()
    marker.counter({"size": 2.0})

    @marker
    def double(x):
        return 2 * x

    assert double(4) == 8
    events = recorder.take()
    spans = [event for event in events if event.duration_ns is not None]
    assert len(spans) == 3
    assert spans[0].start_ns <= spans[1].start_ns <= spans[1].end_ns <= spans[0].end_ns
    assert {event.category for event in events} == {"a,b", "counter"}
    assert [event.values for event in events if event.is_counter] == [{"size": 2.0}]
    assert sum(event.duration_ns is None and not event.is_counter for event in events) == 4
    with pytest.raises(RuntimeError, match="`work` was finished without a start"):
        marker.finish()


MS = 1_000_000  # nanoseconds


def steps(num, step_ms=10, **phases_ms):
    """Return the records of steps with consecutive phases."""
    events, now = [], 0
    for _ in range(num):
        events.append(TraceEvent("step", "step", now, step_ms * MS))
        at = now
        for name, milliseconds in phases_ms.items():
            category = "data" if name == "data" else "listener" if name.startswith("My") else "phase"
            category = "callback" if category == "listener" else category
            events.append(TraceEvent(name, category, at, milliseconds * MS))
            at += milliseconds * MS
        now += step_ms * MS
    return events


def torch_trace(spans, memory=(), num_steps=1, step_ms=10):
    """Return a trace as of torch's profiler, with spans `(category, name, start_ms, duration_ms)`."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n * step_ms * 1e3,
         "dur": step_ms * 1e3, "pid": 1, "tid": 1}
        for n in range(num_steps)
    ]  # fmt: skip
    events += [
        {"ph": "X", "cat": cat, "name": name, "ts": start * 1e3, "dur": ms * 1e3, "pid": 1, "tid": 1}
        for cat, name, start, ms in spans
    ]
    events += [
        {"ph": "i", "name": "[memory]", "ts": at * 1e3, "pid": 1, "tid": 1,
         "args": {"Bytes": size, "Addr": addr, "Device Type": 0, "Device Id": -1}}
        for at, size, addr in memory
    ]  # fmt: skip
    return {"traceEvents": events, "baseTimeNanoseconds": 0}


def test_waits_for_data_and_slow_callbacks_are_reported():
    report = read_profile([compute_figures(steps(4, data=3, forward=4, **{"MySlow.batch_end": 2}))])
    assert report.find("data").share == pytest.approx(0.3)
    assert "30%" in report.find("data").text
    assert "num_workers" in report.find("data").advice
    assert report.find("listeners").text == "`MySlow` took 20% of the time (2.0 ms a step)"
    assert "4 steps, median 10.0 ms: forward 40%" in str(report)
    healthy = read_profile([compute_figures(steps(4, forward=9))])
    assert [finding.topic for finding in healthy.findings] == ["steps"]


def test_a_slow_step_is_reported():
    events = [TraceEvent("step", "step", 0, n * MS) for n in (10, 10, 50, 10)]
    assert "slowest took 50.0 ms" in read_profile([compute_figures(events)]).find("steps").text


def test_gaps_between_kernels_and_exposed_collectives_are_reported():
    spans = [
        ("kernel", "gemm", 0, 3),
        ("kernel", "ncclDevKernel_AllReduce", 2, 4),
        ("cpu_op", "aten::mm", 0, 9),
        ("cuda_runtime", "cudaStreamSynchronize", 1, 1),
        ("cuda_runtime", "cudaDeviceSynchronize", 2, 1),
    ]
    figures = compute_figures(steps(1), torch_trace(spans))
    assert figures.has_device
    assert figures.busy == pytest.approx(0.003)
    assert figures.communication == pytest.approx(0.004)
    assert figures.exposed_communication == pytest.approx(0.003)
    report = read_profile([figures])
    assert "40% of the time, 30% with nothing else" in report.find("communication").text
    assert report.find("gaps").share == pytest.approx(0.4)
    assert "idle during 70% of the time, 40% between kernels (1 kernels a step" in report.find("gaps").text
    assert "2 times a step" in report.find("syncs").text


def test_gaps_between_operators_are_reported_without_a_device():
    report = read_profile([compute_figures(steps(1), torch_trace([("cpu_op", "aten::mm", 1, 4)]))])
    assert report.find("gaps").share == pytest.approx(0.6)
    assert "no operator ran during 60%" in report.find("gaps").text
    busy = read_profile([compute_figures(steps(1), torch_trace([("cpu_op", "aten::mm", 0, 9)]))])
    assert busy.find("gaps") is None


def test_peak_memory_is_reported_by_phase_and_operator(tmp_path):
    spans = [
        ("cpu_op", "aten::linear", 0, 2),
        ("cpu_op", "aten::addmm", 0.5, 1),
        ("cpu_op", "MulBackward", 5, 2),
    ]
    memory = [(1, 1000, 1), (1.5, 3000, 2), (3, 50, 3), (5.5, 500, 4), (6, -3000, 2), (7, -1000, 1)]
    phases = [StepPhase("forward", 0, 4000), StepPhase("backward", 4000, 8000)]
    (timeline,) = memory_timelines(torch_trace(spans, memory), phases)
    assert [size for _, size in timeline.points] == [1000, 4000, 4050, 4550, 1550, 550]
    assert timeline.peak == (5500, 4550)
    live = [(one.phase, one.operator, one.count, one.num_bytes) for one in timeline.live_at_peak]
    assert live == [
        ("forward", "aten::linear", 2, 4000),
        ("backward", "MulBackward", 1, 500),
        ("forward", "outside of operators", 1, 50),
    ]
    page = tmp_path / "memory.html"
    write_memory_timeline(page, [timeline], "a <run>")
    text = page.read_text()
    assert "a &lt;run&gt;" in text
    assert "<svg" in text
    assert "4.4 KiB above the start, in backward" in text
    write_memory_timeline(tmp_path / "memory.json", [timeline], "run")
    assert json.loads((tmp_path / "memory.json").read_text())[0]["peak"] == [5500, 4550]


@pytest.mark.parametrize(
    ("peaks", "unit", "text"),
    [
        ((100, 100, 200, 300, 400), 1 << 20, "higher than the one before"),
        ((100, 100, 900, 100), 1, "9.0 times the median"),
    ],
)
def test_memory_leaks_and_spikes_are_reported(peaks, unit, text):
    events, memory, held = [], [], 0
    for n, peak in enumerate(peaks):
        base = 10 * n
        events.append(TraceEvent("step", "step", base * MS, 10 * MS))
        events.append(TraceEvent("forward", "phase", base * MS, 4 * MS))
        events.append(TraceEvent("optimizer", "phase", (base + 6) * MS, 3 * MS))
        size = (peak - held) * unit
        memory += [(base + 1, size, 2 * n), (base + 7, -size, 2 * n)]
    report = read_profile([compute_figures(events, torch_trace([], memory, num_steps=len(peaks)))])
    assert text in report.find("memory").text


def test_a_slow_rank_is_named():
    ranks = [
        RankFigures(rank=rank, steps=(0.1,), window=0.1, busy=busy)
        for rank, busy in enumerate((0.05, 0.09, 0.06))
    ]
    assert "rank 1 works 64% longer" in read_profile(ranks).find("ranks").text
    assert read_profile(ranks[:1]).find("ranks") is None


def test_an_empty_profile_is_reported():
    assert "no step was recorded" in str(Profiler().report())


def test_traces_are_kept_and_overwritten_as_configured(tmp_path):
    def trace(batch):
        names = {"run_name": "r", "rank": 0, "epoch": 0, "batch": batch}
        return Trace(steps(1), 0, 0, 0, names)

    handler = JSONTraceHandler(tmp_path, num_traces_to_keep=2)
    for batch in range(4):
        handler.merge([handler.save(trace(batch))], {"run_name": "r"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ep0-ba2-rank0.json", "ep0-ba3-rank0.json", "merged_trace.json",
    ]  # fmt: skip
    with pytest.raises(FileExistsError, match="overwrite=True"):
        handler.save(trace(3))
    JSONTraceHandler(tmp_path, overwrite=True).save(trace(3))
    with pytest.raises(TrainerConfigError, match="`filename` is"):
        JSONTraceHandler(tmp_path, "trace.json")


def test_arguments_for_torchs_profiler_are_checked():
    with pytest.raises(TrainerConfigError, match="did you mean `torch_prof_with_stack`"):
        Profiler(torch_prof_with_stacks=True)
    with pytest.raises(TrainerConfigError, match=r"ends in `\.html`"):
        Profiler(torch_prof_memory_filename="memory.pickle")
    with pytest.raises(TrainerConfigError, match="every rank writes one"):
        Profiler(torch_prof_filename="trace.json")
    with pytest.raises(TrainerConfigError, match="`trace_handlers` has a `str`"):
        Profiler(trace_handlers=["traces"])
