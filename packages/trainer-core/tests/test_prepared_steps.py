"""The prepared steps of a fit give the same run as the loop, which is the reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import Callback, ComposerClassifier, DataSpec, LossSum
from hocket.trainer.data.train_loader import TrainLoader
from hocket.trainer.errors import NonFiniteLossError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.loop import loop
from hocket.trainer.optim import LinearScheduler
from hocket.trainer.ranks import step_sync
from support.ranks import run_ranks
from support.training import FileStore, Net, data, loader, make, parameters


class Record(Callback):
    """Records the events that still allow prepared steps, with counts and loss."""

    reads_outputs = False

    def __init__(self, at=None):
        self.seen = []
        self.at = at or {}

    def note(self, event, state):
        loss = repr(state.loss.item()) if isinstance(state.loss, torch.Tensor) else None
        counts = tuple(value for name, value in state.counts._asdict().items() if not name.endswith("_wct"))
        self.seen.append((event, counts, loss, state.is_over(), state.optimizers[0].param_groups[0]["lr"]))


def _noting(event):
    def method(self, state, logger):
        self.note(event, state)
        if event == "batch_end" and (change := self.at.get(state.counts.batch)):
            change(state)

    return method


for _event in (
    "fit_start",
    "epoch_start",
    "after_train_batch",
    "batch_end",
    "batch_checkpoint",
    "epoch_end",
    "epoch_checkpoint",
    "eval_start",
    "eval_end",
    "fit_end",
):
    setattr(Record, _event, _noting(_event))


class Listens(Callback):
    def before_forward(self, state, logger):
        pass


class Sums(Net):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return LossSum(loss * len(batch[0]), len(batch[0]))


class Parts(Net):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return {"total": loss, "half": loss / 2}


class Explodes(Net):
    def loss(self, outputs, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(outputs, batch) * (float("nan") if self.calls == 3 else 1.0)


class Measured(ComposerClassifier):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 3), train_metrics=[MulticlassAccuracy(3)])


def _transformed():
    return DataSpec(dataloader=loader(), microbatch_transforms=lambda batch: [batch[0] * 2, batch[1]])


def _set_microbatches(state):
    state.device_train_microbatch_size = 2


def _is_fourth(state, event):
    return event.value == "batch_checkpoint" and state.counts.batch % 4 == 0


def _set_duration(state):
    state.max_duration = type(state.max_duration)(9, "ba")


CASES = {
    "plain": {},
    "bf16": {"precision": "amp_bf16"},
    "scheduled": {"schedulers": LinearScheduler()},
    "clipped": {"gradient_clipping": 0.1},
    "logged": {"loggers": InMemoryLogger, "log_every": 2},
    "a part of an epoch": {"max_duration": "8ba"},
    "by samples": {"max_duration": "30sp"},
    "few batches": {"train_subset_num_batches": 3},
    "nothing ahead": {"prefetch_depth": 0},
    "deeper": {"prefetch_depth": 3},
    "garbage": {"gc_interval": 2},
    "evaluated": {"eval_dataloader": loader, "eval_interval": "3ba"},
    "saved": {"checkpoint_store": FileStore, "save_interval": "3ba"},
    "saved by a function": {
        "checkpoint_store": FileStore,
        "save_interval": lambda state, event: (
            event.value == "batch_checkpoint" and state.counts.batch % 4 == 0
        ),
    },
    "sums": {"model": Sums},
    "parts": {"model": Parts, "loggers": InMemoryLogger},
    "fp16": {"precision": "amp_fp16", "gradient_clipping": 0.1},
    "microbatches": {"device_train_microbatch_size": 3},
    "microbatches of a transformed batch": {"train_dataloader": _transformed},
    "measured": {"model": Measured, "loggers": InMemoryLogger, "log_every": 2},
    "skipped": {"model": Explodes, "nonfinite_loss": "skip"},
    "stopped": {"at": {4: lambda state: state.stop_training()}},
    "stopped between saves": {
        "at": {4: lambda state: state.stop_training()},
        "checkpoint_store": FileStore,
        "save_interval": "3ba",
    },
    "microbatches from here on": {"at": {4: _set_microbatches}},
    "another duration": {"at": {4: _set_duration}},
    "a listener comes and goes": {
        "at": {
            3: lambda state: state.callbacks.append(Listens()),
            6: lambda state: state.callbacks.pop(),
        }
    },
}
NOT_PLAIN = {"nothing ahead"}


def run(arguments, folder):
    given = dict(arguments)
    record = Record(given.pop("at", None))
    torch.manual_seed(3)
    for name, value in given.items():
        if name == "checkpoint_store":
            given[name] = value(folder)
        elif isinstance(value, type) or value in (loader, _transformed):
            given[name] = value()
    given.setdefault("max_duration", "2ep")
    with make(callbacks=[record], seed=5, **given) as trainer:
        trainer.fit()
        logged = [one.data for one in trainer.logger.destinations if isinstance(one, InMemoryLogger)]
        rng = torch.get_rng_state()
        saved = [entry.step for entry in FileStore(folder).list()] if "checkpoint_store" in given else []
        return record.seen, parameters(trainer), logged, rng, saved


def count_plain_steps(patch):
    """Return a list to which each plain step appends its batch."""
    made = []
    take_ahead = TrainLoader.take_ahead

    def take(self, batch):
        taken = take_ahead(self, batch)
        if taken is not None:
            made.append(batch)
        return taken

    patch.setattr(TrainLoader, "take_ahead", take)
    return made


def check_same(found, expected):
    seen, weights, logged, rng, saved = found
    expected_seen, expected_weights, expected_logged, expected_rng, expected_saved = expected
    assert seen == expected_seen
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    assert torch.equal(rng, expected_rng)
    # Compared as text, in which a NaN equals another.
    assert (repr(logged), saved) == (repr(expected_logged), expected_saved)


@pytest.mark.parametrize("case", CASES)
def test_prepared_steps_give_the_same_run_as_the_loop(case, monkeypatch, tmp_path):
    made = count_plain_steps(monkeypatch)
    found = run(CASES[case], tmp_path / "prepared")
    assert bool(made) == (case not in NOT_PLAIN)
    made.clear()
    monkeypatch.setattr(loop, "prepare_steps", lambda run: None)
    expected = run(CASES[case], tmp_path / "loop")
    assert not made
    check_same(found, expected)


def batches_of(rank):
    """Return batches of 3 samples on rank 0 and of 2 on rank 1; rank 0 has one batch more."""
    x, y = data(32).tensors
    rows = [slice(start, start + 3 - rank) for start in range(0, 32 - 6 * rank, 6)]
    return [[x[one], y[one]] for one in rows]


RANK_CASES = {
    "plain": {},
    "microbatches": {"device_train_microbatch_size": 2},
    "logged": {"loggers": InMemoryLogger, "gradient_clipping": 0.1},
    "sums": {"model": Sums},
    "measured": {"model": Measured, "loggers": InMemoryLogger},
    "skipped": {"model": Explodes, "nonfinite_loss": "skip"},
    "stopped on one": {"at": {4: lambda state: os.environ["RANK"] == "1" and state.stop_training()}},
}


def compare_on_a_rank(folder):
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        made = count_plain_steps(patch)
        num_plain = {}
        for case, given in RANK_CASES.items():
            arguments = {**given, "train_dataloader": batches_of(rank), "auto_shard": False}
            made.clear()
            found = run(arguments, Path(folder))
            num_plain[case] = len(made)
            with patch.context() as inner:
                inner.setattr(loop, "prepare_steps", lambda run: None)
                made.clear()
                check_same(found, run(arguments, Path(folder)))
                assert not made
                # Exchanging by an all-reduce, as on several hosts, gives the same bits as by sockets.
                inner.setattr(step_sync, "connect_ranks", lambda *ranks, **options: None)
                check_same(found, run(arguments, Path(folder)))
        return num_plain


def test_on_two_ranks_prepared_steps_and_both_exchanges_give_the_same_run(tmp_path):
    for num_plain in run_ranks(compare_on_a_rank, 2, str(tmp_path), timeout_s=240):
        # In each of two epochs of 5 steps the loop makes the first step, which starts the epoch.
        assert num_plain.pop("stopped on one") in (3, 4)
        assert set(num_plain.values()) == {8}


def test_a_nonfinite_loss_raises_before_the_update_of_a_plain_step():
    with make(model=Explodes(), seed=5, max_duration="2ba") as short:
        short.fit()
        expected = parameters(short)
    with (
        make(model=Explodes(), seed=5, max_duration="2ep") as trainer,
        pytest.raises(NonFiniteLossError, match="batch 3 on rank 0 is nan"),
    ):
        trainer.fit()
    assert trainer.state.counts.batch == 2
    assert all(torch.equal(value, expected[name]) for name, value in parameters(trainer).items())
