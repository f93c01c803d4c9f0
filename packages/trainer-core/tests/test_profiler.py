"""Profiles of trainings: the written files, on one rank and on two, and no cost without a profiler."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time

import pytest
import torch
from torch.utils.data import DistributedSampler

from hocket.trainer import Algorithm, Event, Trainer
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.profiler import JSONTraceHandler, Profiler, cyclic_schedule, merge_traces
from support.ranks import run_ranks
from support.training import Net, Watch, loader, make


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


class Slow(Algorithm):
    def match(self, event, state):
        return event is Event.AFTER_FORWARD

    def apply(self, event, state, logger):
        time.sleep(0.03)


class SlowBatches:
    """Batches that are slow to fetch."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 12

    def __iter__(self):
        for batch in list(loader(48)):
            time.sleep(self.seconds)
            yield batch


def test_a_profiled_window_writes_traces_and_a_report(tmp_path, caplog):
    profiler = Profiler(
        cyclic_schedule(skip_first=1, warmup=1, active=3),
        [
            JSONTraceHandler(tmp_path / "traces"),
            torch.profiler.tensorboard_trace_handler(str(tmp_path / "board")),
        ],
        sys_prof_memory=True,
        sys_prof_disk=True,
        sys_prof_net=True,
        sys_prof_stats_thread_interval_seconds=0.01,
        torch_prof_folder=str(tmp_path / "torch"),
    )
    seen = []

    def watch(state):
        assert state.profiler is profiler
        with state.profiler.marker("mine"):
            seen.append(state.timestamp.counts.batch)

    with (
        caplog.at_level(logging.INFO, "hocket.trainer.profiler"),
        make(
            max_duration="8ba", profiler=profiler, algorithms=Slow(), callbacks=Watch(watch),
            train_dataloader=SlowBatches(0.05), loggers=InMemoryLogger(),
        ) as trainer,
    ):  # fmt: skip
        trainer.fit()
        assert len(trainer.logger.destinations[0].data["loss/train/total"]) == 8
    (path,) = (tmp_path / "traces").glob("ep*")
    assert path.name == "ep0-ba5-rank0.json"
    events = events_of(path)
    steps = [event["args"]["batch"] for event in events if event["name"] == "step"]
    assert steps == [2, 3, 4]
    names = [event["name"] for event in events]
    for phase in ("forward", "loss", "backward", "optimizer", "wait for the data loader"):
        assert names.count(phase) == 3, phase
    assert names.count("Slow.after_forward") == 3
    assert names.count("mine") == 3
    assert {"cpu", "memory", "disk", "network"} <= set(names)
    assert "aten::addmm" in names
    # All events use one clock: torch's forward pass lies within Hocket's.
    first = next(event for event in events if event["name"] == "forward")
    product = next(e for e in events if e["name"] == "aten::addmm" and e["ts"] >= first["ts"])
    assert product["ts"] + product["dur"] <= first["ts"] + first["dur"]
    assert len(list((tmp_path / "torch").iterdir())) == 1
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert len(events_of(tmp_path / "traces" / "merged_trace.json")) == len(events)

    report = profiler.report()
    assert report.find("data").share > 0.05
    assert "`Slow` took" in report.find("listeners").text
    assert "cpu: memory peaked at" in report.find("memory").text
    assert str(report) in caplog.text


def test_the_profiler_call_of_the_tutorials_works(tmp_path, caplog, monkeypatch):
    """A memory page turns on everything that it needs, and logs it once."""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "hocket.trainer.profiler"):
        profiler = Profiler(
            trace_handlers=[JSONTraceHandler(folder="traces")],
            schedule=cyclic_schedule(),
            torch_prof_memory_filename="memory_timeline.html",
        )
    assert caplog.text.count("record_shapes, with_stack") == 1
    with make(max_duration="6ba", profiler=profiler, run_name="first") as trainer:
        trainer.fit()
    page = (tmp_path / "first" / "torch_traces" / "memory_timeline.html").read_text()
    assert "Alive at the peak" in page
    assert "aten::" in page
    assert (tmp_path / "traces" / "merged_trace.json").exists()


@pytest.mark.parametrize("kind", ["ours", "torchs"])
def test_cycles_are_profiled_also_if_the_training_ends_within_one(tmp_path, kind):
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 0}
    schedule = cyclic_schedule(**options) if kind == "ours" else torch.profiler.schedule(**options)
    handler = JSONTraceHandler(tmp_path, merged_trace_filename=None)
    profiler = Profiler(
        schedule, handler, torch_prof_folder=str(tmp_path / "torch"), torch_prof_num_traces_to_keep=1
    )
    with make(max_duration="11ba", profiler=profiler) as trainer:
        trainer.fit()
    assert [path.name for path in handler.saved] == [f"ep{n // 5}-ba{n}-rank0.json" for n in (4, 8, 11)]
    assert [len(report.figures[0].steps) for report in profiler.reports] == [2, 2, 1]
    assert len(list((tmp_path / "torch").iterdir())) == 1


def test_a_resumed_run_is_profiled_from_its_own_first_batch(tmp_path):
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=1), torch_prof_profile_memory=False, torch_prof_with_flops=False
    )
    with make(max_duration="3ba") as trainer:
        trainer.fit()
    with make(max_duration="9ba", profiler=profiler) as trainer:
        trainer.state.timestamp = trainer.state.timestamp.to_next_batch(samples=4).to_next_batch(samples=4)
        trainer.fit()
    assert profiler.first_batch == 2
    assert len(profiler.reports) == 1
    # torch's profiler is off: Hocket's own records have the steps and their parts.
    assert "1 steps" in str(profiler.report())


def test_a_profiler_is_pickled_until_it_is_in_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the traces of torch
    handler = JSONTraceHandler(tmp_path / "traces")
    original = Profiler(cyclic_schedule(wait=1, active=2), handler, sys_prof_memory=True)
    profiler = pickle.loads(pickle.dumps(original))
    marker = pickle.loads(pickle.dumps(original.marker("a")))
    with marker, make(profiler=profiler, max_duration="6ba") as trainer:
        trainer.fit()
        with pytest.raises(TypeError, match=r"`Profiler` has profiled .* cannot be copied or pickled"):
            pickle.dumps(profiler)
    assert [len(report.figures[0].steps) for report in profiler.reports] == [2]
    assert any((tmp_path / "traces").rglob("*.json*"))
    with pytest.raises(AttributeError, match=r"'schedule\.<locals>"):  # torch's own function
        pickle.dumps(Profiler(torch.profiler.schedule(wait=1, warmup=1, active=1)))


def test_a_failed_training_writes_its_trace(tmp_path):
    def fail(state):
        if state.timestamp.counts.batch == 4:
            raise RuntimeError("broken")

    handler = JSONTraceHandler(tmp_path)
    profiler = Profiler(cyclic_schedule(active=100), handler, torch_prof_folder=str(tmp_path / "torch"))
    with (
        pytest.raises(RuntimeError, match="broken"),
        make(max_duration="9ba", profiler=profiler, callbacks=Watch(fail)) as trainer,
    ):
        trainer.fit()
    assert handler.saved[0].exists()
    assert len(profiler.report().figures[0].steps) == 3


def test_a_profiler_changes_no_result_and_without_one_no_event_is_recorded(tmp_path):
    def train(**arguments):
        with make(max_duration="7ba", train_dataloader=list(loader()), **arguments) as trainer:
            listeners = {event: len(getattr(trainer.engine.on, event.value)) for event in Event}
            trainer.fit()
            return dict(trainer.state.model.state_dict()), listeners

    plain, listeners = train()
    assert listeners[Event.BEFORE_FORWARD] == 0
    profiled, _ = train(profiler=Profiler(torch_prof_folder=str(tmp_path)))
    assert all(torch.equal(profiled[name], value) for name, value in plain.items())


def profile_on_ranks(folder):
    """Profile two ranks, of which the second is slow."""
    model = Net()
    rank = int(os.environ["RANK"])
    profiler = Profiler(
        cyclic_schedule(warmup=1, active=2),
        JSONTraceHandler(f"{folder}/traces"),
        torch_prof_folder=f"{folder}/torch",
        # torch's recording of CPU memory has aborted a rank that also ran gloo's threads.
        torch_prof_profile_memory=False,
    )
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=loader(batch_size=2, sampler=DistributedSampler(list(range(20)), 2, rank)),
        callbacks=[Watch(lambda state: time.sleep(0.02 * rank))],
        max_duration="4ba",
        progress_bar=False,
        device="cpu",
        profiler=profiler,
    ) as trainer:
        trainer.fit()
    report = profiler.report()
    return [one.rank for one in report.figures], len(report.figures[0].steps), report.figures[0].communication


def test_traces_of_ranks_are_merged(tmp_path):
    outcomes = run_ranks(profile_on_ranks, 2, str(tmp_path), timeout_s=120)
    assert [ranks for ranks, _, _ in outcomes] == [[0, 1], [1, 0]]
    assert all(steps == 2 for _, steps, _ in outcomes)
    assert all(seconds > 0 for _, _, seconds in outcomes)
    merged = events_of(tmp_path / "traces" / "merged_trace.json")
    steps = {pid: [e["ts"] for e in merged if e["name"] == "step" and e["pid"] == pid] for pid in (0, 1)}
    assert [len(times) for times in steps.values()] == [2, 2]
    # One host has one clock: the ranks' steps overlap.
    assert abs(steps[0][0] - steps[1][0]) < 1e6
    of_torch = {event["pid"] for event in merged if event.get("cat") == "cpu_op"}
    assert len(of_torch) == 2
    again = tmp_path / "again.json.gz"
    merge_traces(again, (tmp_path / "traces").glob("ep*.json"))
    assert again.stat().st_size > 0
