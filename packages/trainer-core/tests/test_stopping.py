"""Runs that end early, cannot start, skip a step, or run out of data at different times on their ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.trainer import Callback
from hocket.trainer.callbacks import LRMonitor
from hocket.trainer.errors import ResumeError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.optim import LinearScheduler
from hocket.trainer.precision import Precision
from support.ranks import run_ranks
from support.training import Watch, loader, make, parameters


class StopDuring(Callback):
    """A callback that stops the training during a step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state, logger):
        if state.timestamp.counts.batch == self.batch:
            state.stop_training()


def test_stopping_during_a_batch_keeps_its_learning_rate():
    memory = InMemoryLogger()
    callbacks = [StopDuring(3), LRMonitor()]
    with make(
        max_duration="10ba", callbacks=callbacks, schedulers=LinearScheduler(), loggers=memory
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.counts.batch == 4
        assert str(trainer.state.max_duration) == "10ba"
    rates = memory.get_timeseries("lr-SGD/group0")["lr-SGD/group0"]
    assert rates == pytest.approx([0.1, 0.09, 0.08, 0.07])


def test_a_stopped_run_continues_with_the_next_fit():
    with make(max_duration="6ba", callbacks=[Watch(lambda state: state.stop_training())]) as trainer:
        for expected in (1, 2):
            trainer.fit()
            assert trainer.state.timestamp.counts.batch == expected


class NoSuchCheckpoint:
    """A store without the requested checkpoint."""

    def save(self, state, **options):
        raise AssertionError("nothing was to be saved")

    def load(self, source, into, **options):
        raise FileNotFoundError(f"no checkpoint `{source}`")

    def list(self):
        return []

    def delete(self, step):
        raise AssertionError("nothing was to be deleted")


def test_a_trainer_that_fails_to_start_releases_its_callbacks():
    mine = StopDuring(0)
    with pytest.raises(FileNotFoundError, match="`gone`"):
        make(
            max_duration="1ep", callbacks=mine, load_path="gone", checkpointing={"store": NoSuchCheckpoint()}
        )
    make(max_duration="1ep", callbacks=mine).close()


def test_fp16_continues_after_a_step_without_loss_weight():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    precision = Precision("amp_fp16", torch.device("cpu"))
    for skip in (True, False):
        precision.backward(parameter.sum())
        precision.unscale([optimizer])
        precision.step([optimizer], skip=skip)
    assert torch.allclose(parameter, torch.full((3,), 0.9))


def test_resuming_with_another_class_of_optimizer_raises(tmp_path):
    with make(max_duration="2ba", save_folder=str(tmp_path)) as trainer:
        trainer.fit()
    model = make().state.model
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(ResumeError, match="state of `SGD`, and this run's optimizer is `Adam`"):
        make(model=model, optimizers=adam, max_duration="4ba", save_folder=str(tmp_path), autoresume=True)


class Counting:
    """A `Stateful` loader of `num_batches` batches an epoch, which resumes at the position of its state."""

    def __init__(self, num_batches: int) -> None:
        self.batches = list(loader(4 * num_batches))
        self.epoch = self.position = 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def train_with_uneven_loaders():
    import os

    mine = Counting(5 - int(os.environ["RANK"]))
    with make(train_dataloader=mine, max_duration="3ep") as trainer:
        trainer.fit()
        return trainer.state.timestamp.counts.batch, mine.state_dict(), parameters(trainer)


def test_the_shortest_loader_ends_an_epoch_for_all_ranks():
    (batches, state, mine), (others, other_state, theirs) = run_ranks(
        train_with_uneven_loaders, 2, timeout_s=120
    )
    assert batches == others == 3 * 4
    assert state == other_state == {"epoch": 3, "position": 0}
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_unreachable_save_folder_raises_before_training(monkeypatch):
    from hocket.native.errors import StoreError

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        make(max_duration="1ba", save_folder="s3://nobody/nothing")
