"""Sharded and replicated training compute the same numbers as one process with the plain model."""

import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from hocket.dist import provide
from hocket.trainer.models import ComposerClassifier
from support.standing_ranks import StandingRanks
from support.training import data, make

STEPS = 20
MAX_NORM = 1.0


class Block(nn.Module):
    """A residual block whose inner width no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A model with a loss, for the trainer, whose head has 3 rows, fewer than 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch["y"])


class Case(NamedTuple):
    """A layout, and how a rank's batch is divided."""

    config: dict[str, Any] | None
    microbatches: int = 1
    sync: str = "every"


class Run(NamedTuple):
    """The losses, norms and parameters of one rank."""

    initial: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    kinds: set[str]
    class_name: str
    description: str


CASES = {
    "fsdp": Case({}),
    "fsdp, microbatches": Case({}, 2),
    "fsdp, microbatches, one synchronisation": Case({}, 2, "last"),
    "zero2": Case({"sharding_strategy": "SHARD_GRAD_OP"}),
    "one group": Case({"auto_wrap": False}),
    "replicated": Case(None),
    "replicated, microbatches": Case(None, 2),
    "replicated, microbatches, one synchronisation": Case(None, 2, "last"),
}
CASES_OF_4 = {
    "fsdp": Case({}),
    "hsdp": Case({"data_parallel_replicate_degree": 2}),
    "re-sharded over 2": Case({"reshard_after_forward": 2}),
    "replicated": Case(None),
}


def _build(seed: int = 3) -> Classifier:
    torch.manual_seed(seed)
    return Classifier()


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield the global batches, which are equal on all ranks."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        x = torch.randn(8, 5, generator=generator)
        yield {"x": x, "y": torch.randint(0, 3, (8,), generator=generator)}


def _share(batch: dict[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(count)[index] for key, value in batch.items()}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters by name, gathered from their shards. Collective."""
    found = {}
    for name, value in model.named_parameters():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = full.detach().clone()
    return found


@functools.cache
def _alone() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float], list[float]]:
    """Train the plain model in this process, as the reference."""
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    initial, losses, norms = _whole(model), [], []
    for batch in _batches():
        loss = model.loss(model(batch), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return initial, _whole(model), losses, norms


def _train(case: Case) -> Run:
    with provide(case.config, device="cpu", timeout_s=30) as parallelism:
        rank, size = parallelism.data_parallel
        model = _build(seed=3 if rank == 0 else 99)  # the weights of rank 0 replace those of the others
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        laid_out = parallelism.lay_out(model, [optimizer])
        initial, losses, norms = _whole(laid_out), [], []
        for batch in _batches():
            mine = torch.zeros(1, dtype=torch.float64)
            for index in range(case.microbatches):
                part = _share(_share(batch, rank, size), index, case.microbatches)
                parallelism.sync_gradients(laid_out, case.sync == "every" or index == case.microbatches - 1)
                loss = laid_out.loss(laid_out(part), part) / case.microbatches
                loss.backward()
                mine += loss.detach().double()
            norm = parallelism.clip_grad_norm_(laid_out.parameters(), MAX_NORM)
            assert type(norm) is torch.Tensor
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append((parallelism.reduce_async(mine).wait() / size).item())
        kinds = {type(value).__name__ for value in laid_out.state_dict().values()}
        name = type(laid_out).__name__
        return Run(initial, _whole(laid_out), losses, norms, kinds, name, parallelism.describe())


def _check(runs: list[Run], *, is_sharded: bool) -> None:
    initial, parameters, losses, norms = _alone()
    assert max(norms) > MAX_NORM, "nothing was clipped, so clipping is not tested"
    for run in runs:
        assert run.kinds == {"DTensor" if is_sharded else "Tensor"}
        assert list(run.parameters) == list(parameters)
        for name, value in parameters.items():
            assert torch.equal(run.initial[name], initial[name]), name
            torch.testing.assert_close(run.parameters[name], value, atol=1e-6, rtol=0)
        assert run.losses == pytest.approx(losses, abs=1e-6)
        assert run.norms == pytest.approx(norms, rel=1e-5)
        assert run.norms == runs[0].norms, "the norm differs between ranks"


@pytest.mark.parametrize("name", ["fsdp", "zero2", "replicated", "fsdp, microbatches"])
def test_one_rank_trains_as_the_plain_model(one_rank: None, name: str) -> None:
    _check([_train(CASES[name])], is_sharded=CASES[name].config is not None)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(two_ranks: StandingRanks, name: str) -> None:
    _check(two_ranks.run(_train, CASES[name]), is_sharded=CASES[name].config is not None)


@pytest.mark.parametrize("name", CASES_OF_4)
def test_four_ranks_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    _check(four_ranks.run(_train, CASES_OF_4[name]), is_sharded=CASES_OF_4[name].config is not None)


def _copy_on_rank_0() -> tuple[bool, bool]:
    with provide(None, device="cpu", timeout_s=30) as parallelism:
        model = parallelism.lay_out(_build())
        batch = next(_batches())
        outputs = model(batch)
        if parallelism.data_parallel[0]:
            return True, True
        copied = copy.deepcopy(model)
        of_copy = copied(batch)
        copied.loss(of_copy, batch).backward()  # of the model itself, it would wait for the other rank
        return copied.forward.__self__ is copied, torch.equal(of_copy, outputs)


def test_a_copy_of_a_replicated_model_is_a_plain_model(two_ranks: StandingRanks) -> None:
    assert two_ranks.run(_copy_on_rank_0) == [(True, True), (True, True)]


def _measure_a_short_tail() -> float:
    """Train on 5 samples in batches of 4, so that one rank has no sample of the last batch."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = ComposerClassifier(layers, num_classes=3, train_metrics=SumOfTargets())
    with make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=DataLoader(data(5), batch_size=2),
        global_train_batch_size=4,
        max_duration="1ep",
        fsdp_config={},
        dist_timeout=20.0,
    ) as trainer:
        trainer.fit()
        return float(next(iter(trainer.state.train_metric_values.values())))


class SumOfTargets(SumMetric):
    """The sum of the targets, each plus 1."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().update(targets + 1)


def test_ranks_without_a_share_of_the_last_batch_measure_nothing(two_ranks: StandingRanks) -> None:
    expected = float((data(5)[:][1] + 1).sum())
    assert two_ranks.run(_measure_a_short_tail) == [expected, expected]


def test_the_layout_is_described(two_ranks: StandingRanks, four_ranks: StandingRanks) -> None:
    assert two_ranks.run(_train, CASES["fsdp"])[1].description == (
        "FSDP2 (FULL_SHARD), 2 ranks: dp_shard 2; 4 groups, parameters gathered as they are, "
        "gradients summed in float32"
    )
    replicated = two_ranks.run(_train, CASES["replicated"])[1]
    assert replicated.description == "replicated on 2 ranks, gradients averaged"
    assert replicated.class_name == "Classifier", "a replicated model changed its class"
    assert "dp_replicate 2 × dp_shard 2" in four_ranks.run(_train, CASES_OF_4["hsdp"])[0].description
