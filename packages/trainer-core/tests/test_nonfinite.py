"""A loss that is NaN or infinite: raise, skip or ignore, on one rank and on two."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torchmetrics import SumMetric

from hocket.trainer.errors import NonFiniteLossError, RankFailedError, TrainerConfigError
from hocket.trainer.loop.nonfinite import NonFiniteGuard
from hocket.trainer.timestamp import Counts
from support.ranks import run_ranks
from support.training import FileStore, Net, loader, make, parameters


class Explodes(Net):
    """A model whose loss of one batch is not finite."""

    def __init__(self, at=2, value=float("nan"), **options):
        super().__init__(**options)
        self.at, self.value, self.calls = at, value, 0

    def loss(self, outputs, batch):
        self.calls += 1
        loss = super().loss(outputs, batch)
        return loss * self.value if self.calls == self.at else loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises_before_the_update(value, tmp_path):
    with make(max_duration="1ba") as trainer:
        trainer.fit()
        expected = parameters(trainer)
    trainer = make(
        model=Explodes(value=value),
        max_duration="5ba",
        checkpointing={"store": FileStore(tmp_path)},
        save_interval="1ba",
    )
    with pytest.raises(NonFiniteLossError, match=r"the loss of batch 2 on rank 0 is (nan|inf)"):
        trainer.fit()
    for name, value in parameters(trainer).items():
        assert torch.equal(value, expected[name])
    assert [entry.step for entry in FileStore(tmp_path).list()] == [1]


def test_a_skipped_step_changes_only_the_time(caplog):
    batches = list(loader())
    arguments = {"loop": {"nonfinite_loss": "skip"}, "train_dataloader": batches}
    with make(model=Explodes(), max_duration="5ba", **arguments) as trainer:
        trainer.fit()
        skipped = parameters(trainer)
        assert trainer.state.timestamp.batch == "5ba"
    assert "batch 2: the loss is not finite" in caplog.text
    without = [*batches[:1], *batches[2:]]
    with make(max_duration="4ba", train_dataloader=without) as trainer:
        trainer.fit()
        for name, value in parameters(trainer).items():
            assert torch.equal(value, skipped[name])


def test_the_batch_after_a_skipped_step_is_in_the_metrics():
    class Counted(Explodes):
        def get_metrics(self, is_train=False):
            return {"samples": SumMetric()} if is_train else {}

        def update_metric(self, batch, outputs, metric):
            metric.update(len(outputs))

    with make(model=Counted(), max_duration="5ba", loop={"nonfinite_loss": "skip"}) as trainer:
        trainer.fit()
        assert trainer.state.train_metric_values["samples"] == trainer.state.timestamp.sample.value


def test_a_nonfinite_loss_may_be_ignored_and_unknown_policies_raise():
    with make(model=Explodes(), max_duration="3ba", loop={"nonfinite_loss": "ignore"}) as trainer:
        trainer.fit()
        assert all(value.isnan().any() for value in parameters(trainer).values())
    with pytest.raises(TrainerConfigError, match="`nonfinite_loss` is 'stop'; expected one of `raise`"):
        make(loop={"nonfinite_loss": "stop"})


class OnDevice(torch.Tensor):
    """A number that appears to be on another device, and that records each operation that reads it."""

    reads: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, number):
        return torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, device="meta")

    def __init__(self, number):
        self.number = number

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[2:] == (True,):
            return args[0].fill_(args[1].number)  # an asynchronous copy
        cls.reads.append(function.name())
        return torch.tensor(args[0].number) if function is torch.ops.aten._to_copy.default else args[0].number


@pytest.mark.parametrize("read", [float, torch.Tensor.item, torch.Tensor.cpu, bool])
def test_reads_of_the_device_are_recorded(read, monkeypatch):
    monkeypatch.setattr(OnDevice, "reads", [])
    read(OnDevice(1.0))
    assert len(OnDevice.reads) == 1
    with pytest.raises(RuntimeError, match=r"tolist\(\) is not supported"):
        OnDevice(1.0).tolist()


def test_checking_the_loss_reads_no_device(monkeypatch):
    monkeypatch.setattr(OnDevice, "reads", [])
    with make() as trainer:
        state = SimpleNamespace(device=torch.device("cuda"), parallelism=trainer.state.parallelism)
        guard = NonFiniteGuard("raise", state, trainer._run.sync, trainer._run.loader)
        for batch, number in enumerate((1.0, float("nan"))):
            state.counts = Counts(batch=batch)
            assert guard.allows(OnDevice(number))
        state.counts = Counts(batch=2)
        with pytest.raises(NonFiniteLossError, match="the loss of batch 2 on rank 0 is nan"):
            guard.allows(OnDevice(1.0))
    assert OnDevice.reads == []


def explode_on_one_rank():
    rank = int(os.environ["RANK"])
    results = []
    for policy in ("skip", "raise"):
        model = Explodes(at=2 if rank else 0)
        batches = [[part[rank::2] for part in batch] for batch in loader(40, 4)]
        try:
            with make(
                model=model,
                max_duration="8ba",
                train_dataloader=batches,
                loop={"nonfinite_loss": policy},
                optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            ) as trainer:
                trainer.fit()
                results.append([value.tolist() for value in parameters(trainer).values()])
        except (NonFiniteLossError, RankFailedError) as error:
            results.append((type(error).__name__, str(error)))
    return results


def test_all_ranks_skip_or_raise_together():
    (skipped, raised), (other, own) = run_ranks(explode_on_one_rank, 2, init="gloo", timeout_s=120)
    assert skipped == other
    assert own[0] == "NonFiniteLossError"
    assert "batch 2 on rank 1" in own[1]
    assert raised[0] == "RankFailedError"
    assert "rank 1 failed" in raised[1]
