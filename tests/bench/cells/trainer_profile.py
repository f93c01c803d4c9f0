"""The time of each duty of Hocket's step: `tests/bench/trainer.py --profile`.

Every duty is a method of an object of the run. The script replaces it by one that reads the clock around the
call, and subtracts the time of duties called within it and of reading the clock. A row is the median of all
calls times the calls of a step, which an interrupted step does not change. The user's own work (fetching,
forward, loss, backward, optimizer) is a row, too; the rest is the trainer's.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cells.trainer import STEPS, Batches, Net, sgd


class Stopwatch:
    """Records the exclusive time of each call of the wrapped functions."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, list[int]] = {}
        self.reading_ns = 0
        """Nanoseconds that a wrapped call takes beyond the recorded time."""
        self._inner_ns = 0
        empty, clock = self.wrap("empty", lambda: None), time.perf_counter_ns
        readings = []
        for _ in range(10_000):
            start = clock()
            empty()
            readings.append(clock() - start - self.spent_ns["empty"][-1])
        self.reading_ns = int(statistics.median(readings))
        self.spent_ns.clear()

    def wrap(self, duty: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts as `duty`."""
        clock = time.perf_counter_ns
        durations = self.spent_ns.setdefault(duty, [])

        def timed(*arguments: Any, **options: Any) -> Any:
            outer, self._inner_ns = self._inner_ns, 0
            start = clock()
            try:
                return function(*arguments, **options)
            finally:
                spent = clock() - start
                durations.append(spent - self._inner_ns)
                self._inner_ns = outer + spent + self.reading_ns

        return timed


def _instrument(trainer: Any, model: Net, optimizer: Any, watch: Stopwatch) -> None:
    run = trainer._run
    loader, sync = run.loader, run.sync
    prefetcher = loader.prefetcher
    duties: list[tuple[str, Any, str]] = [
        ("user: forward", trainer.state.module, "forward"),
        ("user: loss", model, "loss"),
        ("user: optimizer step", optimizer, "step"),
        ("user: zero_grad", optimizer, "zero_grad"),
        ("user: next batch", prefetcher, "next_batch"),
        ("take the batch", loader, "take"),
        ("fetch ahead", loader, "fetch_ahead"),
        ("count the batch", loader, "_fetch"),
        ("facts of the batch", sync, "of_one"),
        ("log: capture", trainer.logger, "log_metrics"),
        *(("log: queue", queue, "put") for queue in trainer.logger.queues),
        ("events", trainer.engine, "fire"),
    ]
    for duty, owner, name in duties:
        setattr(owner, name, watch.wrap(duty, getattr(owner, name)))
    for callback in [*trainer.state.callbacks, *trainer.logger.destinations]:
        if "batch_end" in vars(type(callback)):
            name = type(callback).__name__
            callback.batch_end = watch.wrap(f"`{name}.batch_end`", callback.batch_end)
    trainer.engine.prepare()


def _profile(rounds: int, arguments: dict[str, Any], title: str) -> None:
    from hocket.trainer import Trainer
    from hocket.trainer.loop import loop, nonfinite

    watch = Stopwatch()
    model = Net()
    optimizer = sgd(model)
    backward, after_batch, allows = (
        torch.Tensor.backward,
        loop.after_batch,
        nonfinite.NonFiniteGuard.allows,
    )
    starts: list[int] = []
    with Trainer(
        model=model, train_dataloader=Batches(), optimizers=optimizer, device="cpu", **arguments
    ) as trainer:
        _instrument(trainer, model, optimizer, watch)
        take = trainer._run.loader.take

        def start_step(batch: int) -> Any:
            starts.append(time.perf_counter_ns())
            return take(batch)

        trainer._run.loader.take = start_step
        torch.Tensor.backward = watch.wrap("user: backward", backward)
        loop.after_batch = watch.wrap("counts", after_batch)
        nonfinite.NonFiniteGuard.allows = watch.wrap("look at the loss", allows)
        try:
            for _ in range(rounds):
                trainer.fit("1ep")
        finally:
            torch.Tensor.backward = backward
            loop.after_batch = after_batch
            nonfinite.NonFiniteGuard.allows = allows
    steps = rounds * STEPS
    medians = {
        duty: statistics.median(spent) * len(spent) / steps / 1000
        for duty, spent in watch.spent_ns.items()
        if len(spent) > steps / 2
    }
    step_us = statistics.median(after - before for before, after in itertools.pairwise(starts)) / 1000
    readings = sum(len(spent) for spent in watch.spent_ns.values()) / steps * watch.reading_ns / 1000
    medians["the loop itself"] = step_us - readings - sum(medians.values())
    print(f"\n| duty, {title} | µs a step |\n|---|---|")
    for duty in sorted(medians, key=lambda duty: (duty.startswith("user"), -medians[duty])):
        print(f"| {duty} | {medians[duty]:.2f} |")
    total_us = sum(value for duty, value in medians.items() if not duty.startswith("user"))
    print(f"| **the trainer's, together** | {total_us:.1f} |")


def main(rounds: int) -> None:
    """Print the duties of a step with nothing in use, and in use."""
    from hocket.trainer import Callback
    from hocket.trainer.callbacks import LRMonitor
    from hocket.trainer.loggers import FileLogger

    class Count(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def batch_end(self, state: Any, logger: Any) -> None:
            self.batches += 1

    torch.set_num_threads(1)
    _profile(rounds, {"progress_bar": False}, "nothing in use")
    with tempfile.TemporaryDirectory() as folder:
        file = FileLogger(str(Path(folder) / "log.jsonl"))
        callbacks = [LRMonitor(), *(Count() for _ in range(4))]
        with open(Path(folder) / "stderr", "w") as stderr:
            before, sys.stderr = sys.stderr, stderr
            try:
                _profile(rounds, {"progress_bar": True, "loggers": file, "callbacks": callbacks}, "in use")
            finally:
                sys.stderr = before
