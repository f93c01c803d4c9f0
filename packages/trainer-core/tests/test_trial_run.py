"""Trials of a script: `fast_dev_run`, `overfit_batches`, and an evaluation before the training."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hocket.trainer import Callback, Evaluator, Event
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.optim import LinearScheduler
from support.ranks import run_ranks
from support.training import Net, Recorder, data, loader, make, parameters


class Batches(Callback):
    """Records the batches of training, and the number of batches of each evaluation."""

    def __init__(self):
        self.trained, self.evaluated, self.rates = [], [], []

    def before_forward(self, state, logger):
        self.trained.append(state.batch[0].clone())
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    def eval_end(self, state, logger):
        self.evaluated.append(state.eval_timestamp.counts.batch)


def test_a_fast_run_makes_an_epoch_and_an_evaluation_and_writes_no_files(tmp_path, capsys):
    folder, memory, recorder, seen = tmp_path / "run", InMemoryLogger(), Recorder(), Batches()
    with make(
        loop={"fast_dev_run": 2},
        max_duration="9ep",
        schedulers=LinearScheduler(),
        eval_dataloader=Evaluator(label="own", dataloader=loader(), subset_num_batches=4),
        eval_interval="100ba",
        save_folder=str(folder),
        autoresume=True,
        loggers=memory,
        callbacks=[recorder, seen],
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.counts[1:3] == (1, 2)
        assert seen.evaluated == [2]
        for event in (Event.EPOCH_END, Event.EVAL_END, Event.FIT_END):
            assert recorder.events.count(event) == 1
        # The learning rates are those of the whole run's first batches, not of a run of two batches.
        assert seen.rates == pytest.approx([0.1, 0.1 * (1 - 1 / 18)])
        trainer.eval(loader())
        assert seen.evaluated == [2, 2]
        trainer.save_checkpoint_to_save_folder()
        trainer.fit("3ep")
        assert trainer.state.timestamp.counts[1:3] == (2, 4)
    assert not folder.exists()
    assert not memory.data
    assert "`fast_dev_run`: at most 2 batches" in capsys.readouterr().err


def test_fast_dev_run_true_makes_one_batch_and_respects_a_shorter_subset():
    with make(loop={"fast_dev_run": True}, max_duration="9ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 1
    with make(loop={"fast_dev_run": 3}, train_subset_num_batches=2, max_duration="9ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 2
    with make(loop={"fast_dev_run": 3}, max_duration="2ba") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize(("given", "num"), [(2, 2), (0.5, 2), (0.01, 1), (99, 5)])
def test_overfitting_repeats_the_first_batches_in_order(given, num):
    seen = Batches()
    shuffled = loader(shuffle=True)
    with make(
        loop={"overfit_batches": given},
        train_dataloader=shuffled,
        eval_dataloader=loader(),
        callbacks=seen,
        max_duration="3ep",
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.counts[1:3] == (3, 3 * num)
    stored = data().tensors[0].split(4)[:num]
    assert all(torch.equal(*pair) for pair in zip(seen.trained, stored * 3, strict=True))
    assert seen.evaluated == [num] * 3


def test_overfitting_repeats_the_same_batches_of_a_self_shuffling_loader():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(5), torch.tensor(1)

    class InPlace(Callback):
        def after_backward(self, state, logger):
            state.batch[0].zero_()

    seen = Batches()
    with make(
        loop={"overfit_batches": 2},
        train_dataloader=DataLoader(Endless(), batch_size=3),
        callbacks=[seen, InPlace()],
        max_duration="2ep",
    ) as trainer:
        trainer.fit()
    first, second = seen.trained[:2], seen.trained[2:]
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(first, second, strict=True))


def test_a_fraction_of_a_loader_without_length_raises():
    class Unsized(IterableDataset):
        def __iter__(self):
            return iter(data())

    with pytest.raises(DataError, match=r"`overfit_batches` is the share 0\.5.*no length.*whole number"):
        make(loop={"overfit_batches": 0.5}, train_dataloader=DataLoader(Unsized(), batch_size=4))


@pytest.mark.parametrize(
    "given",
    [
        {"loop": {"fast_dev_run": -1}},
        {"loop": {"fast_dev_run": 0.5}},
        {"loop": {"overfit_batches": 1.5}},
        {"loop": {"overfit_batches": -2}},
        {"loop": {"overfit_batches": True}},
        {"loop": {"num_sanity_val_steps": -2}},
        {"loop": {"num_sanity_val_steps": 0.5}},
    ],
)
def test_invalid_values_raise(given):
    (name,) = given["loop"]
    with pytest.raises(TrainerConfigError, match=f"`{name}` is .*; expected"):
        make(**given)


def test_the_sanity_evaluation_comes_first_and_changes_nothing():
    def run(**arguments):
        recorder, memory, model = Recorder(), InMemoryLogger(), Net(dropout=0.5)
        forwards = []
        model.register_forward_hook(lambda *_: forwards.append(model.training))
        with make(
            model=model,
            train_dataloader=loader(shuffle=True),
            eval_dataloader=loader(16, shuffle=True),
            callbacks=recorder,
            loggers=memory,
            max_duration="1ep",
            **arguments,
        ) as trainer:
            trainer.fit()
            trainer.fit("1ep")
            return forwards, recorder.events, memory.data, parameters(trainer)

    plain = run()
    checked = run(loop={"num_sanity_val_steps": 2})
    assert checked[0] == [False, False, *plain[0]]
    assert checked[1] == plain[1]
    assert checked[2].keys() == plain[2].keys()
    assert all(torch.equal(checked[3][name], value) for name, value in plain[3].items())
    assert run(loop={"num_sanity_val_steps": -1})[0] == [False] * 4 + plain[0]


def test_the_sanity_evaluation_finds_an_error_before_the_first_step():
    class Broken(Net):
        def eval_forward(self, batch, outputs=None):
            raise ZeroDivisionError("a metric that was never run")

    recorder = Recorder()
    with (
        make(
            model=Broken(), eval_dataloader=loader(4), callbacks=recorder, loop={"num_sanity_val_steps": 1}
        ) as trainer,
        pytest.raises(ZeroDivisionError) as found,
    ):
        trainer.fit("1ep")
    assert "sanity evaluation of `eval`" in found.value.__notes__[0]
    assert Event.BATCH_START not in recorder.events
    with (
        make(eval_dataloader=[], loop={"num_sanity_val_steps": 1}) as trainer,
        pytest.raises(DataError, match="no batch"),
    ):
        trainer.fit("1ep")


def test_a_resumed_run_makes_no_sanity_evaluation(tmp_path):
    def run(duration):
        model, modes = Net(), []
        model.register_forward_hook(lambda *_: modes.append(model.training))
        with make(
            model=model,
            eval_dataloader=loader(4),
            eval_interval=0,
            loop={"num_sanity_val_steps": 1},
            save_folder=str(tmp_path),
            autoresume=True,
            max_duration=duration,
        ) as trainer:
            trainer.fit()
        return modes

    assert run("2ba") == [False, True, True]
    assert run("3ba") == [True]


def _trials_on_two_ranks():
    counts = []
    for options in (
        {
            "loop": {"fast_dev_run": 1, "num_sanity_val_steps": 1},
            "eval_dataloader": loader(),
            "max_duration": "5ep",
        },
        {"loop": {"overfit_batches": 2}, "max_duration": "3ep"},
        {"loop": {"overfit_batches": 1}, "global_train_batch_size": 6, "max_duration": "2ep"},
    ):
        seen = Batches()
        with make(callbacks=seen, train_dataloader=loader(shuffle=True), **options) as trainer:
            trainer.fit()
            counts.append((trainer.state.timestamp.counts[1:4], seen.evaluated))
        num = options["loop"].get("overfit_batches", 1)
        assert all(torch.equal(seen.trained[i], seen.trained[i % num]) for i in range(len(seen.trained)))
    return counts


def test_trials_on_two_ranks_end_together():
    first, second = run_ranks(_trials_on_two_ranks, 2, timeout_s=180)
    assert first == second == [((1, 1, 8), [1]), ((3, 6, 48), []), ((2, 2, 12), [])]
