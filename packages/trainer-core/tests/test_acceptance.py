"""Behaviour documented by Composer and not tested elsewhere: durations, resuming, surgery, logs, losses."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hocket.trainer import Algorithm, Callback, DataSpec, Event
from hocket.trainer.callbacks import LRMonitor
from hocket.trainer.errors import ResumeError
from hocket.trainer.loggers import FileLogger, InMemoryLogger
from hocket.trainer.optim import LinearScheduler
from support.ranks import run_ranks
from support.training import FileStore, Net, Recorder, loader, make, parameters


def test_reset_time_keeps_the_optimizers_state():
    model = Net()
    with make(model=model, optimizers=torch.optim.Adam(model.parameters()), max_duration="3ba") as trainer:
        trainer.fit()
        before = [int(slots["step"]) for slots in trainer.state.optimizers[0].state.values()]
        trainer.state.callbacks.append(check := At(1))
        trainer.fit("1ba", reset_time=True)
        assert check.seen == [1]
        (steps,) = {int(slots["step"]) for slots in trainer.state.optimizers[0].state.values()}
        assert steps == 4
        assert set(before) == {3}


class At(Callback):
    """Records the batches, and stops the training at one of them."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.seen = []

    def batch_end(self, state, logger):
        self.seen.append(state.timestamp.counts.batch)
        if state.timestamp.counts.batch == self.stop_at:
            state.stop_training()


def test_stopping_finishes_the_batch_its_evaluation_and_its_checkpoint(tmp_path):
    recorder, store = Recorder(), FileStore(tmp_path)
    with make(
        callbacks=[At(2), recorder],
        eval_dataloader=loader(4),
        eval_interval="1ba",
        checkpointing={"store": store},
        save_interval="1ba",
        loop={"prefetch_depth": 0},
        max_duration="9ba",
    ) as trainer:
        trainer.fit()
    last = len(recorder.events) - recorder.events[::-1].index(Event.BATCH_END) - 1
    rest = recorder.events[last:]
    assert rest.index(Event.EVAL_START) < rest.index(Event.BATCH_CHECKPOINT) < rest.index(Event.FIT_END)
    assert [entry.step for entry in store.list()] == [1, 2]


def test_a_resume_with_another_duration_uses_it_and_its_schedule(tmp_path):
    store, rates = FileStore(tmp_path), {}

    class Rates(Callback):
        def batch_start(self, state, logger):
            rates[state.timestamp.counts.batch] = state.optimizers[0].param_groups[0]["lr"]

    def run(duration, stop_at=None):
        with make(
            schedulers=LinearScheduler(),
            callbacks=[At(stop_at), Rates()],
            max_duration=duration,
            checkpointing={"store": store},
            autoresume=True,
            loop={"prefetch_depth": 0},
        ) as trainer:
            trainer.fit()
            return trainer.state.timestamp.counts.batch

    assert run("4ba", stop_at=2) == 2
    assert run("8ba") == 8
    # The schedule depends on the time only, so it is a line to the new end.
    assert [rates[batch] for batch in range(2, 8)] == pytest.approx([0.1 * (1 - b / 8) for b in range(2, 8)])


def test_autoresume_loads_the_whole_checkpoint_even_if_load_path_loads_a_part(tmp_path):
    first = FileStore(tmp_path / "first")
    with make(max_duration="2ba", checkpointing={"store": first}) as trainer:
        trainer.fit()
    store = FileStore(tmp_path / "own")
    options = {"load_path": str(tmp_path / "first" / "ep0-ba2"), "load_weights_only": True}
    options |= {"checkpointing": {"store": store}, "autoresume": True, "max_duration": "3ba"}
    with make(**options) as trainer:
        assert trainer.state.timestamp.batch == 0
        trainer.fit()
        end = parameters(trainer)
    with make(**options, load_ignore_keys=["model/*"]) as trainer:
        assert trainer.state.timestamp.batch == 3
        assert all(torch.equal(end[name], value) for name, value in parameters(trainer).items())


def _on_a_rank(folder):
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)
    model = Net(seed=rank)
    drawn = []

    class Draw(Callback):
        def fit_start(self, state, logger):
            drawn.append(torch.rand(4))

    own = FileStore(Path(folder) / str(rank))
    with make(
        model=model, callbacks=Draw(), checkpointing={"store": own}, save_interval="1ba", max_duration="2ba"
    ) as trainer:
        start = parameters(trainer)
        trainer.fit()
    # The ranks' checkpoints have the same name but different steps.
    names = sorted(entry.name for entry in own.list())
    shutil.copy(own.folder / names[rank], own.folder / "last")
    with pytest.raises(ResumeError) as refused:
        make(checkpointing={"store": own}, load_path=str(own.folder / "last"))
    return start, drawn, str(refused.value)


def test_replicas_start_equal_with_own_generators_and_different_steps_raise(tmp_path):
    (start, drawn, message), (start_1, drawn_1, message_1) = run_ranks(
        _on_a_rank, 2, str(tmp_path), timeout_s=180
    )
    assert all(torch.equal(start[name], value) for name, value in start_1.items())
    assert not torch.equal(drawn[0], drawn_1[0])
    for one in (message, message_1):
        assert "different steps (rank 0: 1, rank 1: 2)" in one


def test_a_failed_asynchronous_save_ends_the_training_within_a_batch(tmp_path):
    class Failing(FileStore):
        def save(self, state, **options):
            def wait(timeout_s=None):
                raise OSError("the bucket is gone")

            return SimpleNamespace(name="none", wait=wait, done=lambda: True)

    with (
        make(
            checkpointing={"store": Failing(tmp_path), "asynchronous": True},
            save_interval="2ba",
            max_duration="9ba",
            callbacks=(at := At()),
        ) as trainer,
        pytest.raises(OSError, match="the bucket is gone"),
    ):
        trainer.fit()
    assert at.seen == [1, 2, 3]


@pytest.mark.parametrize("has_total", [False, True])
def test_a_loss_in_parts_trains_on_its_total_or_on_their_sum(has_total):
    class Parts(Net):
        def loss(self, outputs, batch):
            fit, size = nn.functional.cross_entropy(outputs, batch[1]), outputs.square().mean()
            return {"fit": fit, "size": size} | ({"total": fit + 3 * size} if has_total else {})

    class Whole(Net):
        def loss(self, outputs, batch):
            return super().loss(outputs, batch) + (3 if has_total else 1) * outputs.square().mean()

    memory = InMemoryLogger()
    with (
        make(model=Parts(), loggers=memory, max_duration="3ba") as trainer,
        make(model=Whole(), max_duration="3ba") as other,
    ):
        trainer.fit()
        other.fit()
        torch.testing.assert_close(parameters(trainer), parameters(other))
    logged = {name: dict(memory.data[f"loss/train/{name}"]) for name in ("total", "fit", "size")}
    for batch, total in logged["total"].items():
        assert total == pytest.approx(logged["fit"][batch] + (3 if has_total else 1) * logged["size"][batch])


def test_every_destination_gets_the_same_names_at_the_same_steps(tmp_path):
    first, second, path = InMemoryLogger(), InMemoryLogger(), tmp_path / "log.jsonl"
    with make(
        loggers=[first, FileLogger(str(path)), second],
        callbacks=LRMonitor(),
        eval_dataloader=loader(4),
        eval_interval="2ba",
        max_duration="5ba",
    ) as trainer:
        trainer.fit()
    assert first.data == second.data
    assert {"loss/train/total", "lr-SGD/group0", "metrics/eval/Loss"} <= first.data.keys()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    written = {(name, line["step"]) for line in lines for name in line if "step" in line and name != "step"}
    assert written == {(name, step) for name, points in first.data.items() for step, _ in points}


class Widen(Algorithm):
    """Model surgery that replaces the model's first layer."""

    def __init__(self):
        self.is_done = False

    @staticmethod
    def required_on_load():
        return True

    def match(self, event, state):
        return event is Event.INIT

    def apply(self, event, state, logger):
        layers = state.model.layers
        layers[0] = nn.Sequential(layers[0], nn.Linear(8, 8))
        state.optimizers[0].add_param_group({"params": list(layers[0][1].parameters())})


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_model_changed_by_surgery_does_not_load_without_the_surgery(tmp_path, weights_only):
    with make(
        algorithms=Widen(), save_folder=str(tmp_path), max_duration="1ba", save_weights_only=weights_only
    ) as trainer:
        trainer.fit()
        end = parameters(trainer)
    options = {"load_path": str(tmp_path / "ep0-ba1"), "load_weights_only": weights_only}
    with make(algorithms=Widen(), **options) as trainer:
        assert all(torch.equal(end[name], value) for name, value in parameters(trainer).items())
    with pytest.raises(ResumeError, match=r"a model that `Widen` changed; add it to `algorithms`"):
        make(**options)
    excluded = {"load_exclude_algorithms": ["Widen"], "load_strict_model_weights": False}
    with make(**options, **excluded, load_ignore_keys=None if weights_only else ["optimizers"]) as trainer:
        assert torch.equal(parameters(trainer)["layers.3.weight"], end["layers.3.weight"])


@pytest.mark.parametrize("duration", ["7ba", "28sp", "140tok"])
def test_an_endless_loader_trains_for_batches_samples_and_tokens(duration):
    endless = DataSpec(
        itertools.cycle(list(loader())), get_num_tokens_in_batch=lambda batch: batch[0].numel()
    )
    with make(train_dataloader=endless, max_duration=duration) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 7


def test_train_subset_num_batches_ends_epochs():
    recorder = Recorder()
    with make(train_subset_num_batches=2, callbacks=recorder, max_duration="2ep") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.counts[1:3] == (2, 4)
    assert recorder.events.count(Event.EPOCH_END) == 2
