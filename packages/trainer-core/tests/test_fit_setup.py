"""The arguments of `fit`: data, schedules and time that change between calls, and their resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hocket.trainer import Callback
from support.training import FileStore, make


class Numbers(Dataset):
    """Samples whose five features are all their own number, from `first` on."""

    def __init__(self, num=16, first=0):
        self.num, self.first = num, first

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((5,), float(self.first + index)), 0


class Seen(Callback):
    """Keeps the numbers of the samples of each batch, with the epoch; fails before the end of a batch."""

    def __init__(self, die_at=None):
        self.die_at, self.batches, self.rates = die_at, [], []

    def after_dataloader(self, state, logger):
        self.batches.append((state.timestamp.counts.epoch, state.batch[0][:, 0].int().tolist()))
        self.rates.append(round(state.optimizers[0].param_groups[0]["lr"], 6))

    def batch_end(self, state, logger):
        if state.timestamp.counts.batch == self.die_at:
            raise RuntimeError("killed")


def numbers(first=0, num=16, **options):
    return DataLoader(Numbers(num, first), batch_size=2, **options)


def run(script, folder=None, *, die_at=None, every="3ba", **arguments):
    """Run a script with a trainer until it ends or dies; return what its callback saw."""
    seen = Seen(die_at)
    arguments = {"train_dataloader": None, "max_duration": None, **arguments}
    store = {} if folder is None else {"checkpointing": {"store": FileStore(folder)}, "autoresume": True}
    try:
        with make(callbacks=seen, save_interval=every, **store, **arguments) as trainer:
            script(trainer)
    except RuntimeError as error:
        assert str(error) == "killed"  # noqa: PT017 - a run without `die_at` does not raise
    return seen


def one_fit(trainer):
    trainer.fit("2ep", train_dataloader=numbers(shuffle=True))


def two_fits(trainer):
    trainer.fit("1ep", train_dataloader=numbers())
    trainer.fit("1ep", train_dataloader=numbers(first=100), train_subset_num_batches=7)
    trainer.fit("1ep")


def stateful(trainer):
    trainer.fit("2ep", train_dataloader=numbers(shuffle=True), train_subset_num_batches=7)


SCRIPTS = {
    "one fit": (one_fit, {}),
    "two fits": (two_fits, {}),
    "a loader before": (two_fits, {"train_dataloader": numbers(first=200)}),
    "stateful": (stateful, {"global_train_batch_size": 2}),
}


@pytest.mark.parametrize("die_at", [5, 11])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loader_of_fit_is_resumed_at_its_position(tmp_path, name, die_at):
    script, arguments = SCRIPTS[name]
    whole = run(script, **arguments)
    first = run(script, tmp_path, die_at=die_at, **arguments)
    second = run(script, tmp_path, **arguments)
    saved = die_at // 3 * 3
    assert [*first.batches[:saved], *second.batches] == whole.batches


def test_a_loader_of_fit_after_load_path_is_resumed_at_its_position(tmp_path):
    with make(
        train_dataloader=numbers(), checkpointing={"store": FileStore(tmp_path)}, max_duration="3ba"
    ) as one:
        one.fit()
    seen = Seen()
    arguments = {
        "load_path": "ep0-ba3",
        "checkpointing": {"store": FileStore(tmp_path)},
        "save_overwrite": False,
    }
    with make(train_dataloader=None, callbacks=seen, save_filename="b{batch}", **arguments) as other:
        other.fit("1ba", train_dataloader=numbers())
        other.fit("1ba", train_dataloader=numbers(first=100))
    assert seen.batches == [(0, [6, 7]), (1, [100, 101])]


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.LinearLR])
def test_a_scheduler_of_fit_is_resumed(tmp_path, kind):
    def script(trainer):
        optimizer = trainer.state.optimizers[0]
        scheduler = kind(optimizer, 3, gamma=0.1) if kind.__name__ == "StepLR" else kind(optimizer, 0.5)
        trainer.fit("10ba", schedulers=scheduler, step_schedulers_every_batch=True)

    arguments = {"train_dataloader": numbers(num=40)}
    whole = run(script, **arguments)
    first = run(script, tmp_path, die_at=5, **arguments)
    assert [*first.rates[:3], *run(script, tmp_path, **arguments).rates] == whole.rates


def test_each_fit_changes_the_data_of_the_one_before():
    seen = Seen()
    with make(train_dataloader=numbers(), train_dataloader_label="first", callbacks=seen) as trainer:
        trainer.fit("1ba", train_subset_num_batches=3)
        assert trainer.state.dataloader_label == "first"
        trainer.fit("1ba", train_dataloader=numbers(first=100), train_dataloader_label="second")
        trainer.fit("1ep", train_subset_num_batches=2)
        assert trainer.state.dataloader_label == "second"
    assert [batch for _, batch in seen.batches] == [[0, 1], [100, 101], [100, 101], [102, 103]]
    seen = Seen()
    with make(train_dataloader=None, callbacks=seen) as trainer:
        trainer.fit("1ba", train_dataloader=numbers())
        trainer.fit("1ep", train_subset_num_batches=2)
    assert [batch for _, batch in seen.batches] == [[0, 1], [0, 1], [2, 3]]


def test_global_batches_go_on_with_the_order_of_the_next_epoch():
    seen, arguments = Seen(), {"train_dataloader": numbers(num=8, shuffle=True), "global_train_batch_size": 2}
    with make(callbacks=seen, **arguments) as trainer:
        trainer.fit("1ep")
        trainer.fit("1ep", train_subset_num_batches=3)
    whole = run(lambda trainer: trainer.fit("2ep"), **arguments)
    assert seen.batches == whole.batches[:7]


@pytest.mark.parametrize("spins", [False, True])
def test_fit_decides_whether_a_resumed_loader_is_spun(tmp_path, spins):
    arguments = {"train_dataloader": numbers()}
    run(lambda trainer: trainer.fit("2ep"), tmp_path, die_at=5, **arguments)

    def script(trainer):
        trainer.fit("2ep", spin_dataloaders=spins)

    seen = run(script, tmp_path, spin_dataloaders=not spins, **arguments)
    assert seen.batches[0] == (0, [6, 7] if spins else [0, 1])


def test_a_fit_from_time_zero_evaluates_and_saves_again(tmp_path):
    labels, store = [], FileStore(tmp_path)

    class Labels(Callback):
        def eval_start(self, state, logger):
            labels.append(state.timestamp.counts.batch)

    saved = []
    store.save = lambda state, *, step, **options: (
        saved.append(step) or SimpleNamespace(name=str(step), wait=lambda: None, done=lambda: True)
    )
    arguments = {"train_dataloader": numbers(num=8), "eval_dataloader": numbers(num=8), "max_duration": "1ep"}
    never = {"save_interval": lambda state, event: False}  # then only the end of a fit saves
    with make(callbacks=Labels(), checkpointing={"store": store}, **never, **arguments) as trainer:
        trainer.fit()
        trainer.fit("1ep", reset_time=True)
    assert labels == [4, 4]
    assert saved == [4, 4]
