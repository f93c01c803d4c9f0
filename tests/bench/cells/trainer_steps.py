"""Single steps of the cells in one process, by quantiles: `tests/bench/trainer.py --steps`.

The cells alternate in one process, and the clock is read at each fetch of a batch. A low quantile excludes
steps that the machine, the garbage collector or another thread interrupted, so that it is steady on a busy
machine. It shows the work of the training thread only; the cost of logging in other threads is in the
processor time of the other tables.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from cells import trainer
from cells.trainer import CELLS, STEPS, Batches, Net
from torch import nn


class TimedBatches(Batches):
    """Yields batches and records the time of each fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched_ns = [0] * STEPS

    def __iter__(self) -> Iterator[Any]:
        times, clock = self.fetched_ns, time.perf_counter_ns
        for index, batch in enumerate(self.batches):
            times[index] = clock()
            yield batch


class OneLayer(Net):
    """A single layer, whose bare step takes a third of the time, so that the trainer's share is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(64, 8)


def main(names: list[str], rounds: int, *, is_small: bool = False) -> None:
    """Print quantiles of the steps of cells; the first cell is the base.

    Args:
        names: The cells.
        rounds: Number of runs of each cell.
        is_small: Whether to train `OneLayer`.
    """
    torch.set_num_threads(1)
    if is_small:
        trainer.Net = OneLayer
    steps: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        runs = {name: (data := TimedBatches(), CELLS[name](data)) for name in names}
        for number in range(rounds + 1):
            for name, (data, run) in runs.items():
                run()
                if number:  # the first round warms up
                    pairs = itertools.pairwise(data.fetched_ns[3:])
                    steps[name] += [(after - before) / 1000 for before, after in pairs]
    quantiles = {name: statistics.quantiles(values, n=20) for name, values in steps.items()}
    print("| cell | µs a step, 5 % | 25 % | 50 % | over bare, 5 % | 25 % | 50 % |")
    print("|---|---|---|---|---|---|---|")
    for name, values in quantiles.items():
        picked = [values[index] for index in (0, 4, 9)]
        over = [values[index] - quantiles[names[0]][index] for index in (0, 4, 9)]
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in (*picked, *over)) + " |")
