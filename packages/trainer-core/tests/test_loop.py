"""The training loop: what a turn calls, and what the exchange between ranks gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from hocket.trainer import Callback, ComposerClassifier, LossSum
from hocket.trainer.errors import NonFiniteLossError
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.ranks import step_sync
from support.ranks import run_ranks
from support.training import FileStore, Net, data, make, parameters


class Record(Callback):
    """Records events with counts, loss, and learning rate."""

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


class Sums(Net):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return LossSum(loss * len(batch[0]), len(batch[0]))


class Explodes(Net):
    def loss(self, outputs, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().loss(outputs, batch) * (float("nan") if self.calls == 3 else 1.0)


class Measured(ComposerClassifier):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 3), train_metrics=[MulticlassAccuracy(3)])


def run(arguments, folder):
    given = dict(arguments)
    record = Record(given.pop("at", None))
    torch.manual_seed(3)
    for name, value in given.items():
        if name == "checkpointing":
            given[name] = {"store": value["store"](folder)}
        elif isinstance(value, type):
            given[name] = value()
    given.setdefault("max_duration", "2ep")
    with make(callbacks=[record], seed=5, **given) as trainer:
        trainer.fit()
        logged = [one.data for one in trainer.logger.destinations if isinstance(one, InMemoryLogger)]
        rng = torch.get_rng_state()
        saved = [entry.step for entry in FileStore(folder).list()] if "checkpointing" in given else []
        return record.seen, parameters(trainer), logged, rng, saved


def check_same(found, expected):
    seen, weights, logged, rng, saved = found
    expected_seen, expected_weights, expected_logged, expected_rng, expected_saved = expected
    assert seen == expected_seen
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    assert torch.equal(rng, expected_rng)
    # Compared as text, in which a NaN equals another.
    assert (repr(logged), saved) == (repr(expected_logged), expected_saved)


class Steps(Callback):
    """Counts the calls of Hocket's functions, and their modules, in one turn of the loop."""

    def __init__(self):
        self.modules = []

    def batch_end(self, state, logger):
        sys.setprofile(self.note if state.counts.batch == 8 else None)

    def note(self, frame, kind, _):
        name = frame.f_globals.get("__name__", "")
        if kind == "call" and name.startswith("hocket."):
            self.modules.append((name, frame.f_code.co_name))


def test_a_plain_run_calls_the_loop_that_is_written():
    """Everything of a step is called from `train_batch`, in few modules and calls."""
    steps = Steps()
    try:
        with make(callbacks=steps, max_duration="12ba") as trainer:
            trainer.fit()
    finally:
        sys.setprofile(None)
    assert ("hocket.trainer.loop.loop", "train_batch") in steps.modules
    assert len(steps.modules) <= 35, steps.modules
    assert len({module for module, _ in steps.modules}) <= 14


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
    "skipped": {"model": Explodes, "loop": {"nonfinite_loss": "skip"}},
    "stopped on one": {"at": {4: lambda state: os.environ["RANK"] == "1" and state.stop_training()}},
}


def compare_on_a_rank(folder):
    rank = int(os.environ["RANK"])
    for given in RANK_CASES.values():
        settings = {**given.get("loop", {}), "auto_shard": False}
        arguments = {**given, "train_dataloader": batches_of(rank), "loop": settings}
        found = run(arguments, Path(folder))
        with pytest.MonkeyPatch.context() as patch:
            # Exchanging by an all-reduce, as on several hosts, gives the same bits as by sockets.
            patch.setattr(step_sync, "connect_ranks", lambda *ranks, **options: None)
            check_same(found, run(arguments, Path(folder)))


def test_on_two_ranks_both_exchanges_give_the_same_run(tmp_path):
    run_ranks(compare_on_a_rank, 2, str(tmp_path), timeout_s=240)


def test_a_nonfinite_loss_raises_before_the_update():
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
