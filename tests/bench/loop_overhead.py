"""What a step of the trainer costs beyond the user's own work: Hocket's loop against a bare loop.

Both train the same tiny MLP on the CPU, over the same batches in a list, interleaved in rounds, so that a
change of the machine's speed meets both. Run it with `uv run python tests/bench/loop_overhead.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from hocket.trainer import ComposerModel, Trainer
from hocket.trainer.callbacks import LRMonitor, SpeedMonitor
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.optim import CosineAnnealingWithWarmupScheduler

Batch = list[torch.Tensor]


class Net(ComposerModel):
    """A multi-layer perceptron of 8 inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, `(B, 2)` float."""
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1])


def batches(num: int) -> list[Batch]:
    """`num` batches of 4 samples."""
    return [[torch.randn(4, 8), torch.randint(0, 2, (4,))] for _ in range(num)]


def bare(num: int) -> Callable[[], float]:
    """A loop as one writes it without a trainer; returns seconds a step."""
    model, data = Net(), batches(num)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> float:
        start = time.perf_counter()
        for batch in data:
            loss = model.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - start) / num

    return run


def hocket(num: int, **arguments: object) -> Callable[[], float]:
    """The trainer's loop over the same; returns seconds a step."""
    model = Net()
    trainer = Trainer(
        model=model,
        train_dataloader=batches(num),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        progress_bar=False,
        device="cpu",
        **arguments,
    )

    def run() -> float:
        with contextlib.redirect_stderr(io.StringIO()):
            # What `fit` does once, before and after its steps, is left out by measuring two lengths.
            short, long = num // 10, num - num // 10
            seconds = []
            for length in (short, long):
                start = time.perf_counter()
                trainer.fit(f"{length}ba")
                seconds.append(time.perf_counter() - start)
        return (seconds[1] - seconds[0]) / (long - short)

    return run


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loops = {
        "bare loop": bare(options.steps),
        "hocket": hocket(options.steps),
        "hocket, one logger": hocket(options.steps, loggers=InMemoryLogger()),
        "hocket, logger, schedule, 2 monitors": hocket(
            options.steps,
            loggers=InMemoryLogger(),
            callbacks=[SpeedMonitor(), LRMonitor()],
            schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="10ba", t_max="1000000ba"),
        ),
    }
    figures: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(options.rounds + 1):
        for name, run in loops.items():
            seconds = run()
            if number:  # the first round warms up
                figures[name].append(seconds * 1e6)
    base = figures["bare loop"]
    print(f"torch {torch.__version__}, {options.rounds} rounds of {options.steps} steps, µs a step")
    print(f"{'':38}{'median':>8}{'min':>8}{'max':>8}{'over bare':>11}")
    for name, values in figures.items():
        over = statistics.median(value - alone for value, alone in zip(values, base, strict=True))
        print(f"{name:38}{statistics.median(values):8.1f}{min(values):8.1f}{max(values):8.1f}{over:11.1f}")


if __name__ == "__main__":
    main()
