"""A loss that is NaN or infinite: raise, skip or ignore, on one rank and on two."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.trainer.errors import NonFiniteLossError, RankFailedError, TrainerConfigError
from support.ranks import run_ranks
from support.training import FileStore, Net, loader, make, parameters


class Explodes(Net):
    """Its loss of one batch is not finite."""

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
        checkpoint_store=FileStore(tmp_path),
        save_interval="1ba",
    )
    with pytest.raises(NonFiniteLossError, match=r"the loss of batch 2 on rank 0 is (nan|inf)"):
        trainer.fit()
    for name, value in parameters(trainer).items():
        assert torch.equal(value, expected[name])
    assert [entry.step for entry in FileStore(tmp_path).list()] == [1]


def test_a_skipped_step_leaves_everything_but_the_time(caplog):
    batches = list(loader())
    arguments = {"nonfinite_loss": "skip", "train_dataloader": batches}
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


def test_a_loss_may_be_ignored_and_other_policies_are_refused():
    with make(model=Explodes(), max_duration="3ba", nonfinite_loss="ignore") as trainer:
        trainer.fit()
        assert all(value.isnan().any() for value in parameters(trainer).values())
    with pytest.raises(TrainerConfigError, match="`nonfinite_loss` is 'stop'; expected one of `raise`"):
        make(nonfinite_loss="stop")


class Kept(TorchDispatchMode):
    """Fails at a read of a tensor's number."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_looking_at_the_loss_reads_no_device():
    with make(max_duration="3ba", train_dataloader=list(loader())) as trainer, Kept():
        trainer.fit()


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
                nonfinite_loss=policy,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            ) as trainer:
                trainer.fit()
                results.append([value.tolist() for value in parameters(trainer).values()])
        except (NonFiniteLossError, RankFailedError) as error:
            results.append((type(error).__name__, str(error)))
    return results


def test_all_ranks_skip_and_raise_together():
    (skipped, raised), (other, own) = run_ranks(explode_on_one_rank, 2, init="gloo", timeout_s=120)
    assert skipped == other
    assert own[0] == "NonFiniteLossError"
    assert "batch 2 on rank 1" in own[1]
    assert raised[0] == "RankFailedError"
    assert "rank 1 failed" in raised[1]
