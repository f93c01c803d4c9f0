"""Notices of the end at random points of a training on two ranks: nearly all of them commit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.trainer import Callback, ComposerModel, Trainer
from support.ranks import run_ranks
from support.sampling import cases

STEPS = 40
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return outputs.square().mean()


class Late:
    """A handler of notices that come when no training is under way."""

    ends_process = True

    def __call__(self, number, frame):
        pass


class Injector(Callback):
    """Sends this process a burst of notices at a random moment of the fit."""

    def __init__(self, seed: int, rank: int) -> None:
        shared = random.Random(seed)
        own = random.Random(2 * seed + rank)
        self.delay_s = shared.uniform(0, 0.25)
        number = shared.choice(NOTICES)
        hit = shared.choice([(0,), (1,), (0, 1)])
        # SIGINT comes from the terminal and from the launcher; a scheduler's warning precedes its SIGTERM.
        copies = 2 if number == signal.SIGINT else own.randint(1, 4)
        self.burst = [number] * copies + [signal.SIGTERM] * own.randint(0, 1) if rank in hit else []
        self.gaps = [own.uniform(0, 0.02) for _ in self.burst]

        self.sent_at: int | None = None

    def fit_start(self, state, logger):
        self.state = state
        self.thread = threading.Thread(target=self.send, name="hocket-injector")
        self.thread.start()

    def batch_end(self, state, logger):
        time.sleep(0.005)

    def send(self) -> None:
        time.sleep(self.delay_s)
        for number, gap in zip(self.burst, self.gaps, strict=True):
            if number != signal.SIGINT or signal.getsignal(number) is not signal.default_int_handler:
                if self.sent_at is None:
                    self.sent_at = self.state.timestamp.batch.value
                os.kill(os.getpid(), number)
            time.sleep(gap)


def train_and_notice(folder: Path, seed: int) -> tuple[int, bool, int | None]:
    """Return the batches that were trained, whether a notice ended the training, and when it was sent."""
    injector = Injector(seed, int(os.environ["RANK"]))
    torch.manual_seed(0)
    trainer = Trainer(
        model=Model(),
        train_dataloader=DataLoader(TensorDataset(torch.ones(4 * STEPS, 4)), batch_size=4),
        max_duration=f"{STEPS}ba",
        callbacks=injector,
        save_folder=str(folder),
        save_interval="1000ba",
        device="cpu",
        progress_bar=False,
        dist_timeout=30,
    )
    is_ended = False
    try:
        trainer.fit()
    except SystemExit:
        is_ended = True
    finally:
        injector.thread.join()
        trainer.close()
    return trainer.state.timestamp.batch.value, is_ended, injector.sent_at


def inject(folder: Path, seeds: list[int]) -> list[tuple[int, bool, int | None]]:
    # A notice after the end of a fit finds everything saved.
    for number in NOTICES:
        if number != signal.SIGINT:
            signal.signal(number, Late())
    return [train_and_notice(folder / str(seed), seed) for seed in seeds]


@pytest.mark.slow
def test_notices_at_random_points_commit(tmp_path: Path) -> None:
    count = cases(full=200, sample=5)
    seeds = list(range(count))
    first, second = run_ranks(inject, 2, tmp_path, seeds, timeout_s=60 + 4 * count)
    committed, in_time = [], []
    for seed, (batch, is_ended, sent), other in zip(seeds, first, second, strict=True):
        assert other[:2] == (batch, is_ended), f"{seed}: the ranks ended after different batches"
        if min(at for at in (sent, other[2], STEPS) if at is not None) < STEPS - 5:
            in_time.append(seed)
            names = [path.name for path in (tmp_path / str(seed)).iterdir()]
            if is_ended and any(name.endswith(f"-ba{batch}") for name in names):
                committed.append(seed)
    assert len(in_time) >= count // 2, "hardly a notice came in time"
    assert len(committed) >= 0.99 * len(in_time), f"not committed: {sorted(set(in_time) - set(committed))}"
