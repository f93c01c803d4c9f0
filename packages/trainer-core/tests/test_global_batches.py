"""`GlobalBatchLoader`: global batches are the same on any number of ranks, and may grow."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from hocket.trainer import Callback
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.optim import BatchSizeWarmupScheduler
from support.ranks import run_ranks
from support.training import FileStore, Net, Watch, data, loader, make, parameters


class Numbers(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.tensor([index])


def read(num, size, num_ranks, *, epochs=1, **options):
    """Return the samples of each global batch, in order, joined from all ranks."""
    loaders = [
        GlobalBatchLoader(DataLoader(Numbers(num), **options), size, (rank, num_ranks), seed=1)
        for rank in range(num_ranks)
    ]
    batches = []
    for _ in range(epochs):
        for parts in zip(*loaders, strict=True):
            rows = [
                part[: one.batch_share()[0]].flatten().tolist()
                for one, part in zip(loaders, parts, strict=True)
            ]
            assert all(len(part) >= 1 for part in parts)
            assert sum(map(len, rows)) == loaders[0].batch_share()[1]
            batches.append([row for part in rows for row in part])
    return batches


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}], ids=str)
def test_global_batches_are_the_same_on_any_number_of_ranks(options):
    alone = read(22, 6, 1, epochs=2, **options)
    assert [len(batch) for batch in alone] == [6, 6, 6, 4, 6, 6, 6, 4] if "drop_last" not in options else 6
    for num_ranks in (2, 3, 5, 7):
        assert read(22, 6, num_ranks, epochs=2, **options) == alone
    first, second = alone[: len(alone) // 2], alone[len(alone) // 2 :]
    assert (first == second) == (not options)


def test_batches_grow_with_the_samples_seen():
    warmup = BatchSizeWarmupScheduler(2, 6, t_warmup="20sp", multiple_of=2)
    assert [len(batch) for batch in read(24, warmup, 1, epochs=2)] == [2, 2, 2, 2, 2, 4, 4, 4, 2, 6, 6, 6, 6]
    assert read(24, warmup, 2, epochs=2, shuffle=True) == read(24, warmup, 1, epochs=2, shuffle=True)


def test_leaving_an_epoch_ends_it():
    one = GlobalBatchLoader(DataLoader(Numbers(8)), 4, (0, 1), seed=1)
    next(iter(one))
    assert [batch.flatten().tolist() for batch in one] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert one.state_dict()["epoch"] == 2


def test_an_epoch_that_is_ended_early_is_over_in_the_state():
    one, other = (GlobalBatchLoader(DataLoader(Numbers(8)), 2, (0, 1), seed=1) for _ in range(2))
    batches = iter(one)
    next(batches)
    other.load_state_dict(one.state_dict())
    for part in (one, other):
        part.end_epoch()
        assert part.state_dict() == {
            "epoch": 1,
            "batch": 0,
            "sample": 0,
            "samples_before": 2,
            "batches_before": 1,
        }
        assert len(list(part)) == 4
        assert part.state_dict()["epoch"] == 2


@pytest.mark.parametrize("at", ["3ba", "1ep", "4ba"])
def test_epochs_of_a_part_of_the_data_are_resumed(tmp_path, at):
    def run(losses, stop_at=None, **arguments):
        def watch(state):
            losses[state.timestamp.counts.batch] = float(state.loss)
            if state.timestamp.counts.batch == stop_at:
                raise RuntimeError("killed")

        with make(
            train_dataloader=loader(24, shuffle=True),
            global_train_batch_size=2,
            train_subset_num_batches=3,
            max_duration="3ep",
            callbacks=Watch(watch),
            **arguments,
        ) as trainer:
            trainer.fit()

    whole, losses = {}, {}
    run(whole)
    store = {"checkpointing": {"store": FileStore(tmp_path)}, "save_interval": at, "autoresume": True}
    with pytest.raises(RuntimeError, match="killed"):
        run(losses, stop_at=5, **store)
    run(losses, **store)
    assert losses == whole


class Sizes(Callback):
    def __init__(self):
        self.sizes = []

    def batch_end(self, state, logger):
        before, now = state.previous_timestamp.counts.sample, state.timestamp.counts.sample
        self.sizes.append(now - before)


def test_the_trainer_warms_up_the_batch_size_and_resumes_within_the_warmup(tmp_path):
    def run(store, duration):
        sizes, model = Sizes(), Net()
        with make(
            model=model,
            train_dataloader=loader(24, shuffle=True),
            global_train_batch_size=BatchSizeWarmupScheduler(2, 6, t_warmup="0.5dur"),
            max_duration="40sp",
            callbacks=sizes,
            checkpointing={"store": store},
            save_interval="1ba",
            autoresume=True,
        ) as trainer:
            trainer.state.callbacks.append(Stop(duration))
            trainer.fit()
            return sizes.sizes, parameters(trainer)

    class Stop(Callback):
        def __init__(self, after):
            self.after = after

        def batch_end(self, state, logger):
            if state.timestamp.counts.batch == self.after:
                state.stop_training()

    whole, end = run(FileStore(tmp_path / "whole"), None)
    assert whole[:3] == [2, 2, 2]
    assert max(whole) == 6
    assert sum(whole) >= 40
    first, _ = run(FileStore(tmp_path / "parts"), 3)
    second, resumed = run(FileStore(tmp_path / "parts"), None)
    assert first + second == whole
    assert all(torch.equal(resumed[name], value) for name, value in end.items())


def test_loaders_that_cannot_be_divided_raise():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data())

    with pytest.raises(DataError, match=r"over an `IterableDataset`, which makes its own batches"):
        make(train_dataloader=DataLoader(Stream()), global_train_batch_size=4)
    own = DataLoader(data(), sampler=SubsetRandomSampler([1, 2]))
    with pytest.raises(DataError, match="`SubsetRandomSampler`; leave the sampler out"):
        make(train_dataloader=own, global_train_batch_size=4)
    with pytest.raises(TrainerConfigError, match="`global_train_batch_size` is 0"):
        make(global_train_batch_size=0)
    tokens = BatchSizeWarmupScheduler(2, 6, t_warmup="20tok")
    with pytest.raises(TrainerConfigError, match=r"needs to know the sizes ahead.*`sp`, `ba` or `dur`"):
        make(global_train_batch_size=tokens)


def train_on_a_rank(folder):
    with make(
        train_dataloader=loader(22, shuffle=True),
        global_train_batch_size=6,
        max_duration="7ba",
        save_folder=os.path.join(folder, os.environ["WORLD_SIZE"]),
        save_interval="3ba",
    ) as trainer:
        trainer.fit()
        end = {name: value.tolist() for name, value in parameters(trainer).items()}
        return trainer.state.timestamp.counts.sample, end, torch.rand(3).tolist()


def test_two_ranks_train_as_one_process_and_resume_on_one(tmp_path):
    samples, one, _ = train_alone(tmp_path)
    ranks = run_ranks(train_on_a_rank, 2, str(tmp_path), timeout_s=180)
    for counted, two, _ in ranks:
        assert counted == samples
        assert_close(two, one)
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][2] != ranks[1][2]  # each rank draws numbers of its own
    with make(
        train_dataloader=loader(22, shuffle=True),
        global_train_batch_size=6,
        max_duration="7ba",
        load_path=str(tmp_path / "2" / "ep0-ba3"),
    ) as trainer:
        trainer.fit()
        assert_close({name: value.tolist() for name, value in parameters(trainer).items()}, one)


def train_alone(folder):
    os.environ["WORLD_SIZE"] = "1"
    try:
        return train_on_a_rank(str(folder))
    finally:
        del os.environ["WORLD_SIZE"]


def assert_close(mine, theirs):
    for name, value in theirs.items():
        torch.testing.assert_close(torch.tensor(mine[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)
