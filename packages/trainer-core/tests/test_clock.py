"""The clock of training counts the steps that were made, on one rank and on several."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch

from hocket.trainer import Callback
from hocket.trainer.callbacks import SpeedMonitor
from hocket.trainer.loggers import InMemoryLogger
from support.ranks import run_ranks
from support.training import Net, data, make

PAUSE_S = 0.05
RATE = "throughput/batches_per_sec"


class SlowNet(Net):
    """A classifier whose forward pass takes a known time."""

    def __init__(self, pause_s):
        super().__init__()
        self.pause_s = pause_s

    def forward(self, batch):
        time.sleep(self.pause_s)
        return super().forward(batch)


class SlowSGD(torch.optim.SGD):
    """An optimizer whose step takes a known time."""

    pause_s = 0.0

    def step(self, closure=None):
        time.sleep(self.pause_s)
        return super().step(closure)


class SlowLoader:
    """A loader that takes a known time for each batch."""

    def __init__(self, place, pause_s):
        self.batches = [list(batch) for batch in zip(*(x.split(2) for x in data(40).tensors), strict=True)]
        self.batches = self.batches[place[0] :: place[1]]
        self.pause_s = pause_s

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            time.sleep(self.pause_s)
            yield batch


class Times(Callback):
    """Keeps the training's clock, and this process's own, at the start and at the end of each batch."""

    def __init__(self):
        self.began_s = time.perf_counter()
        self.own_s, self.counted_s = [], []

    def fit_start(self, state, logger):
        self.own_s.append(time.perf_counter())
        self.counted_s.append(state.counts.total_wct)

    batch_end = fit_start


def fit(place, folder, *, slow, num_batches, **arguments):
    """Train with the pause in the part `slow`; return its times, and the first logged rate."""
    model = SlowNet(PAUSE_S if slow == "forward" else 0.0)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    optimizer.pause_s = PAUSE_S if slow == "update" else 0.0
    times, memory = Times(), InMemoryLogger()
    with make(
        model=model,
        optimizers=optimizer,
        train_dataloader=SlowLoader(place, PAUSE_S if slow == "data" else 0.0),
        callbacks=[times, SpeedMonitor()],
        loggers=memory,
        max_duration=f"{num_batches}ba",
        save_folder=folder,
        **arguments,
    ) as trainer:
        trainer.fit()
    return times, memory.data[RATE][0][1]


# The slow part of a step, the save interval, and the depth of prefetch. No batch is ahead before a save.
CASES = [
    ("forward", "100ba", 1),
    ("update", "100ba", 1),
    ("update", "2ba", 1),
    ("update", "100ba", 0),
    ("data", "2ba", 1),
]


def save_by_seconds(place, folder):
    model = SlowNet(0.3)
    times = Times()
    with make(
        model=model,
        train_dataloader=SlowLoader(place, 0.0),
        callbacks=times,
        max_duration="8ba",
        save_folder=folder,
        save_interval="1sec",
    ) as trainer:
        trainer.fit()
    return times.counted_s


def fit_all(folder):
    place = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    told = {"saves": save_by_seconds(place, f"{folder}/saves")}
    for number, (slow, save_interval, depth) in enumerate(CASES):
        arguments = {
            "slow": slow,
            "save_interval": save_interval,
            "autoresume": True,
            "loop": {"prefetch_depth": depth},
            "run_name": "clock",
        }
        started = fit(place, f"{folder}/{number}", num_batches=3, **arguments)
        resumed = fit(place, f"{folder}/{number}", num_batches=5, **arguments)
        told[CASES[number]] = started, resumed
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clock")
    return folder, run_ranks(fit_all, 2, str(folder), init="gloo", timeout_s=100)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_clock_of_several_ranks_counts_every_step_and_is_the_same_on_all(told, case):
    for start_or_resume in range(2):
        (first, _), (other, _) = (rank[case][start_or_resume] for rank in told[1])
        counted_s = first.counted_s
        assert counted_s == other.counted_s
        for num_batches in range(1, len(counted_s)):
            counted = counted_s[num_batches] - counted_s[0]
            # The update of the last step is not over when the clock is read.
            num_pauses = num_batches - (case[0] == "update")
            assert counted >= num_pauses * PAUSE_S
            assert counted <= first.own_s[num_batches] - first.began_s


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_throughput_of_several_ranks_is_that_of_a_whole_step(told, case):
    for times, rate in told[1][0][case]:
        longest_s = max(after - before for before, after in itertools.pairwise(times.own_s))
        assert 0.7 / longest_s <= rate <= 1 / PAUSE_S


def test_saves_by_seconds_are_due_at_the_same_batch_on_all_ranks(told):
    folder, ranks = told
    counted_s, other = (rank["saves"] for rank in ranks)
    assert counted_s == other
    saved = {int(path.name.rpartition("ba")[2]) for path in (folder / "saves").iterdir() if "ba" in path.name}
    due = [at for at in range(1, 9) if int(counted_s[at]) > int(counted_s[at - 1])]
    assert 2 <= len(due) <= len(saved)
    # A save that a long step makes due unforeseen comes a step later.
    assert all(saved & {at, at + 1} for at in due)
