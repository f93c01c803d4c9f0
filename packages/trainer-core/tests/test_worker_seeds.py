"""Workers of a loader draw the same random numbers after a resume as without it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hocket.trainer import Callback
from support.training import FileStore, make


def draw():
    """Return numbers of all generators that torch seeds in a worker, and of its seed."""
    seeded = np.random.default_rng(get_worker_info().seed % 1000).random()
    return [float(torch.rand(())), random.random(), float(np.random.random()), seeded]


class Noisy(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, *draw()]), index % 3


class NoisyStream(IterableDataset):
    """A stream that draws when an iteration begins."""

    def __iter__(self):
        first = get_worker_info().id
        order = (torch.randperm(10) * 2 + first).tolist()
        return ((torch.tensor([index, *draw()]), index % 3) for index in order)


def collate(samples):
    x = torch.stack([x for x, _ in samples])
    x[:, 1:] += torch.tensor(draw())
    return [x, torch.tensor([y for _, y in samples])]


def seed_numpy(worker):
    """Seed NumPy as torch's documentation advises."""
    np.random.seed(torch.initial_seed() % 2**32)


class Batches(Callback):
    def __init__(self, stop):
        self.stop, self.seen = stop, {}

    def batch_start(self, state, logger):
        if state.timestamp.counts.batch == self.stop:
            raise KeyboardInterrupt
        self.seen[state.timestamp.counts.batch] = state.batch[0].tolist()


def train(make_loader, store=None, *, stop=None, **arguments):
    callback = Batches(stop)
    with make(
        train_dataloader=make_loader(),
        callbacks=callback,
        checkpointing={"store": store},
        save_interval="1ba",
        autoresume=store is not None,
        max_duration="3ep",
        **arguments,
    ) as trainer:
        try:
            trainer.fit()
        except KeyboardInterrupt:
            assert stop is not None
    return callback.seen


def loader(data=Noisy, **options):
    given = {"batch_size": 4, "num_workers": 2, "shuffle": data is Noisy} | options
    return lambda: DataLoader(data(), **given)


class Single(Noisy):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return [x[None], torch.tensor([y])]


CASES = {
    "plain": (loader(), {}),
    "persistent": (loader(persistent_workers=True), {}),
    "persistent, collated": (
        loader(persistent_workers=True, collate_fn=collate, worker_init_fn=seed_numpy),
        {},
    ),
    "persistent, own generator": (
        lambda: loader(persistent_workers=True, generator=torch.Generator().manual_seed(1))(),
        {},
    ),
    "persistent, singles": (
        loader(Single, persistent_workers=True, batch_size=None, shuffle=True),
        {"train_subset_num_batches": 5},
    ),
    "persistent, stream": (loader(NoisyStream, persistent_workers=True), {}),
    "global": (loader(), {"global_train_batch_size": 4}),
    "global, persistent": (
        loader(persistent_workers=True, collate_fn=collate, worker_init_fn=seed_numpy),
        {"global_train_batch_size": 4},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_workers_draw_the_same_numbers_after_a_resume(tmp_path, kind):
    make_loader, arguments = CASES[kind]
    whole = train(make_loader, **arguments)
    length = len(whole) // 3
    store, parts = FileStore(tmp_path), {}
    # In the middle of the first epoch, at the end of the second, and in the middle of the third.
    for stop in (3, 2 * length, 2 * length + 2, None):
        parts |= train(make_loader, store, stop=stop, **arguments)
    if kind.startswith("global"):
        whole, parts = ({n: take(rows) for n, rows in one.items()} for one in (whole, parts))
    assert parts == whole
    rows = [tuple(row[1:4]) for batch in whole.values() for row in batch]
    assert len(set(rows)) == len(rows)


def take(rows):
    """Leave out what depends on the worker's number; batches of global loaders change their worker."""
    return [row[:4] for row in rows]


def test_a_shuffle_with_persistent_workers_is_that_of_torch(tmp_path):
    def orders(loader, num_epochs):
        return [[int(x) for batch, _ in loader for x in batch[:, 0]] for _ in range(num_epochs)]

    seen = train(loader(persistent_workers=True))
    numbers = [int(row[0]) for number in range(15) for row in seen[number]]
    torch.manual_seed(3)
    plain = orders(loader(persistent_workers=True)(), 3)
    assert [numbers[:20], numbers[20:40], numbers[40:]] == plain
