"""Callbacks on two ranks reach the same decisions, and name the rank that differs."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time

import pytest
import torch

from hocket.trainer import Callback
from hocket.trainer.callbacks import (
    GoodputMonitor,
    GradNormMonitor,
    MaxTimeStopper,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    SpeedMonitor,
    SpikeWatcher,
    StragglerReport,
)
from hocket.trainer.errors import DivergedError
from hocket.trainer.loggers import InMemoryLogger
from support.ranks import run_ranks
from support.training import Net, Watch, data, make


class Share:
    """A loader of this rank's half of each batch of 8, from 24 samples."""

    def __init__(self, rank, size):
        self.data_parallel = (rank, size)
        self.batch_size = 8 // size
        rows = range(rank, 24, size)
        self.batches = [
            list(data(24)[list(rows[start : start + self.batch_size])])
            for start in range(0, len(rows), self.batch_size)
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Scaled(Net):
    """A model that multiplies the loss of one batch by a number, on one rank."""

    def __init__(self, factor=1.0, at=0, *, is_here=True):
        super().__init__()
        self.factor, self.at, self.count = factor if is_here else 1.0, at, 0

    def loss(self, outputs, batch):
        self.count += 1
        return super().loss(outputs, batch) * (self.factor if self.count == self.at else 1.0)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def fit(place, *callbacks, max_duration="3ba", model=None, **arguments):
    memory = InMemoryLogger()
    trainer = make(
        model=model or Net(),
        train_dataloader=Share(*place),
        callbacks=list(callbacks),
        loggers=memory,
        max_duration=max_duration,
        **arguments,
    )
    with trainer:
        trainer.fit()
    return trainer, memory


def everything(folder):
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {
        "nan": end_by_nan(place),
        "spike": skip_on_one_rank(place),
        "norms": {name: norms(place, config) for name, config in (("ddp", None), ("fsdp", {}))},
        "memory": aggregate(place),
        "straggler": find_straggler(place),
        "max_time": stop_by_one_clock(place),
        "resume": [save_and_resume(place, folder, duration) for duration in ("3ba", "6ba")],
    }


def end_by_nan(place):
    try:
        fit(place, NaNMonitor(), model=Scaled(math.nan, 2, is_here=place[0] == 1), max_duration="2ep")
    except DivergedError as error:
        return str(error)
    return None


def skip_on_one_rank(place):
    watcher = SpikeWatcher("skip", min_batches=3)
    model = Scaled(1e5, 5, is_here=place[0] == 1)
    kept = {}

    def keep(state):
        kept[state.timestamp.counts.batch] = [value.detach().clone() for value in state.model.parameters()]

    _, memory = fit(place, Watch(keep), watcher, model=model, max_duration="2ep")
    is_same = all(torch.equal(one, other) for one, other in zip(kept[4], kept[5], strict=True))
    return is_same, [step for step, is_spike in memory.data["spike/loss"] if is_spike], watcher.state_dict()


def norms(place, config):
    _, memory = fit(
        place, OptimizerMonitor(batch_log_interval=3), GradNormMonitor(3), SpeedMonitor(), fsdp_config=config
    )
    return {
        name: value for name, value in memory.most_recent_values.items() if "norm" in name or "cosine" in name
    }


def aggregate(place):
    ballast = bytearray(b"x" * (60_000_000 * place[0]))
    _, memory = fit(place, MemoryMonitor(dist_aggregate_batch_interval=3))
    del ballast
    return {name: number for name, number in memory.most_recent_values.items() if name.startswith("memory/")}


class SlowForward(Net):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, batch):
        time.sleep(self.seconds)
        return super().forward(batch)


STRAGGLER = ("slowest_rank", "slowdown")


def find_straggler(place):
    lines = Lines()
    logger = logging.getLogger("hocket.trainer.callbacks.straggler_report")
    logger.addHandler(lines)
    model = SlowForward(0.05 if place[0] == 1 else 0.0)
    _, memory = fit(place, StragglerReport(interval=2), model=model, max_duration="4ep")
    logger.removeHandler(lines)
    points = {name: [number for _, number in memory.data[f"straggler/{name}"]] for name in STRAGGLER}
    return points, lines.lines


def stop_by_one_clock(place):
    # Only the clock of rank 1 reaches its limit.
    stopper = MaxTimeStopper("1sec" if place[0] == 1 else "1h")
    pause = Watch(lambda state: time.sleep(0.1))
    trainer, _ = fit(place, pause, stopper, max_duration="100ep")
    return trainer.state.timestamp.counts.batch


class Clocked(Callback):
    """A callback whose state differs between ranks; the checkpoint keeps rank 0's."""

    saves_rank_zero_state = True

    def __init__(self, rank):
        self.value = f"of rank {rank}"

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save_and_resume(place, folder, duration):
    clocked, goodput = Clocked(place[0]), GoodputMonitor()
    trainer, _ = fit(
        place,
        clocked,
        goodput,
        SpeedMonitor(),
        max_duration=duration,
        save_folder=f"{folder}/run",
        save_interval="3ba",
        autoresume=True,
    )
    return clocked.value, goodput.seconds()["restart"] > 0, trainer.state.timestamp.counts.batch


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_ranks(everything, 2, str(tmp_path_factory.mktemp("ranks")), init="gloo", timeout_s=240)


def test_a_nonfinite_loss_on_one_rank_ends_all_ranks_and_is_named(told):
    for rank in told:
        assert rank["nan"].startswith("the loss of batch 2 is not finite on rank 1 of 2")


def test_all_ranks_skip_a_spike_of_one_rank(told):
    assert told[0]["spike"] == told[1]["spike"]
    is_same, steps, _ = told[0]["spike"]
    assert is_same
    assert steps == [5]


def test_norms_of_sharded_parameters_equal_those_of_the_whole_ones(told):
    alone = norms((0, 1), None)
    for kind in ("ddp", "fsdp"):
        for rank in told:
            assert rank["norms"][kind] == pytest.approx(alone, rel=1e-4, abs=1e-6), kind
    assert len(alone) > 20


def test_memory_is_aggregated_over_ranks(told):
    for rank in told:
        seen = rank["memory"]
        own = [other["memory"]["memory/host_rss_mem"] for other in told]
        assert seen["memory/host_rss_mem_min"] == min(own)
        assert seen["memory/host_rss_mem_max"] == max(own)
        assert seen["memory/host_rss_mem_avg"] == pytest.approx(sum(own) / 2)


def test_the_slow_rank_is_named(told):
    for rank in told:
        points, lines = rank["straggler"]
        # Rank 1 is the slowest in most comparisons; a busy machine may have delayed rank 0 in some.
        assert len(points["slowest_rank"]) >= 5
        assert statistics.median_low(points["slowest_rank"]) == 1
        assert statistics.median_low(points["slowdown"]) > 1.3
        assert any(
            line.startswith(f"rank 1 on `{os.uname().nodename}") and "in forward" in line for line in lines
        )


def test_a_time_limit_reached_on_one_rank_stops_all_after_the_same_batch(told):
    assert told[0]["max_time"] == told[1]["max_time"]
    assert 1 <= told[0]["max_time"] <= 12


def test_rank_0s_callback_state_is_saved_if_ranks_differ(told):
    for rank, of in enumerate(told):
        assert of["resume"][0] == (f"of rank {rank}", False, 3)
        assert of["resume"][1] == ("of rank 0", True, 6)
