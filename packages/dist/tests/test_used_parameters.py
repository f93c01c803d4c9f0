"""Sharded models of which ranks use different parameters train as one process does with all rows."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.dist import ModelError, provide
from hocket.dist.layout.used_parameters import UsedParameters
from support.standing_ranks import StandingRanks

STEPS, PASSES, RANKS = 4, 2, 4
BRANCHES = ("left", "right", "both", "none", "scaled")


class Block(nn.Module):
    """Two branches, and a scale that only one of five ways uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        if branch in ("left", "both", "scaled"):
            x = x + self.left(x).tanh()
        if branch in ("right", "both", "scaled"):
            x = x + self.right(x).tanh()
        return x * self.scale if branch == "scaled" else x


class Routed(nn.Module):
    """A model whose blocks use the branch that belongs to the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, branch)
        return self.head(x)


class Full(Routed):
    """A model that can use all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Shared(Routed):
    """A model that runs one block several times."""

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = self.blocks[1](self.blocks[0](x, branch), branch)
        return self.head(x)


class FullShared(Full, Shared):
    """Such a model that runs one block several times."""


class Scored(Routed):
    """A model with scalars, one of them used by some ranks only, and one frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.logit_bias = nn.Parameter(torch.tensor(0.1))
        self.temperature = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        scores = super().forward(x, branch) * self.logit_scale.exp() / self.temperature
        return scores + self.logit_bias if branch == "right" else scores


class Spectral(Routed):
    """A model with a complex parameter, which some ranks use only."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        if branch == "right":
            x = torch.view_as_real(x.to(torch.complex64) @ self.filter).sum(-1)
        return super().forward(x, branch)


Choice = Callable[[int, int, int], str]
"""The branch for a step, a microbatch and a rank."""


class Case(NamedTuple):
    """A layout, a model, and the branches that ranks use."""

    choose: Choice
    config: Mapping[str, Any] = MappingProxyType({})
    model: type[Routed] = Routed
    sync: str = "every"


def _full_then_less(step: int, index: int, rank: int) -> str:
    return "left" if step == 2 else "scaled"


def _differ(step: int, index: int, rank: int) -> str:
    return BRANCHES[(step + index + rank) % 2]


def _alternate(step: int, index: int, rank: int) -> str:
    return BRANCHES[(step + index) % 2]


def _one_joins_late(step: int, index: int, rank: int) -> str:
    return "scaled" if step == 2 and rank == 1 else "left"


def _one_in_one_microbatch(step: int, index: int, rank: int) -> str:
    return "right" if index == step % 2 and rank == 0 else "none"


ONE_GROUP = {"auto_wrap": False}
SEARCHED = {"find_unused_parameters": True}
CASES = {
    "other branches": Case(_differ),
    "other branches, one group": Case(_differ, ONE_GROUP),
    "other branches, other microbatches": Case(_one_in_one_microbatch, sync="last"),
    "other branches, reduced in each pass": Case(_one_in_one_microbatch),
    "gathered once": Case(_differ, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "all ranks alternate": Case(_alternate),
    "a parameter that is used late by one rank": Case(_one_joins_late),
    "parameters left out late": Case(_full_then_less, SEARCHED, Full),
    "a block that runs twice": Case(_differ, {}, Shared),
    "a complex parameter": Case(_differ, {}, Spectral),
    "scalars": Case(_differ, {}, Scored),
    "scalars, one synchronisation": Case(_differ, {}, Scored, "last"),
}
CASES_OF_4 = {
    "replicas": Case(_differ, {"data_parallel_replicate_degree": 2}),
    "replicas, synchronised last": Case(
        _one_in_one_microbatch, {"data_parallel_replicate_degree": 2}, Scored, "replicas_last"
    ),
}


def _rows(step: int, index: int, rank: int) -> torch.Tensor:
    seed = (step * PASSES + index) * RANKS + rank
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))


def _whole(value: Any) -> torch.Tensor:
    return getattr(value, "full_tensor", lambda: value)().detach().clone()


def _train(case: Case, num_ranks: int, parallelism: Any = None) -> dict[str, torch.Tensor]:
    """Train on the rows of this rank, or of all `num_ranks` in one process, and return the parameters."""
    model = case.model()
    # A parameter without a gradient keeps its value; one with a gradient of zero decays and keeps moving.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    ranks = range(num_ranks)
    if parallelism is not None:
        parallelism.lay_out(model, [optimizer])
        ranks = range(parallelism.global_rank, parallelism.global_rank + 1)
    for step in range(STEPS):
        if step == 2 and isinstance(model, Scored):
            model.temperature.requires_grad_(True)
        for index in range(PASSES):
            if parallelism is not None:
                parallelism.sync_gradients(model, index == PASSES - 1)
            for rank in ranks:
                loss = model(_rows(step, index, rank), case.choose(step, index, rank)).square().mean()
                (loss / len(ranks) / PASSES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: _whole(value) for name, value in model.named_parameters()}


def _train_on_a_rank(name: str) -> dict[str, torch.Tensor]:
    case = {**CASES, **CASES_OF_4}[name]
    with provide(case.config, device="cpu", timeout_s=30, gradient_sync=case.sync) as parallelism:
        return _train(case, parallelism.world_size, parallelism)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_other_branches_train_as_one_process(two_ranks: StandingRanks, name: str) -> None:
    expected = _train(CASES[name], 2)
    for parameters in two_ranks.run(_train_on_a_rank, name):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES_OF_4)
def test_four_ranks_with_other_branches_train_as_one_process(four_ranks: StandingRanks, name: str) -> None:
    expected = _train(CASES_OF_4[name], 4)
    for parameters in four_ranks.run(_train_on_a_rank, name):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


def _train_and_count(model: type[Routed], branches: tuple[str, ...]) -> tuple[list[int], str]:
    """Return the number of all-reduces in each pass, up to the error that a pass raises."""
    counts: list[int] = []
    with provide({}, device="cpu", timeout_s=30) as parallelism, pytest.MonkeyPatch.context() as patch:
        laid_out = parallelism.lay_out(model())
        all_reduce = dist.all_reduce

        def count(*args: Any, **options: Any) -> Any:
            counts[-1] += 1
            return all_reduce(*args, **options)

        patch.setattr(dist, "all_reduce", count)
        try:
            for branch in branches:
                counts.append(0)
                laid_out(_rows(0, 0, parallelism.global_rank), branch).square().mean().backward()
        except ModelError as error:
            return counts, str(error)
    return counts, ""


def test_ranks_exchange_until_a_pass_uses_all_parameters(two_ranks: StandingRanks) -> None:
    for counts, message in two_ranks.run(_train_and_count, Full, ("scaled",) * 3):
        assert (counts, message) == ([1, 0, 0], "")
    for counts, message in two_ranks.run(_train_and_count, Routed, ("both",) * 3):
        assert (counts, message) == ([1, 1, 1], "")


@pytest.mark.parametrize("model", [Full, FullShared])
def test_a_parameter_that_is_left_out_after_that_is_named(
    two_ranks: StandingRanks, model: type[Routed]
) -> None:
    for counts, message in two_ranks.run(_train_and_count, model, ("scaled", "scaled", "right")):
        assert len(counts) == 3
        assert "`blocks.1.left.weight`" in message or "`blocks.0.left.weight`" in message
        assert "`find_unused_parameters=True`" in message


def _run_other_groups() -> str:
    with provide({}, device="cpu", timeout_s=30) as parallelism:
        model = Full()
        for block in model.blocks:
            block.left._fsdp_wrap = block.right._fsdp_wrap = True
        laid_out = parallelism.lay_out(model)
        branch = BRANCHES[parallelism.global_rank]
        with pytest.raises(ModelError) as caught:
            laid_out(_rows(0, 0, 0), branch).square().mean().backward()
        return str(caught.value)


def test_ranks_that_run_other_groups_are_told_to_make_them_one(two_ranks: StandingRanks) -> None:
    for message in two_ranks.run(_run_other_groups):
        assert "1 of 2 ranks ran `blocks.0.left`" in message
        assert "`_fsdp_wrap = False`" in message


def test_whole_parameters_are_averaged_over_the_ranks_that_share_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of other pipeline stages have other parameters."""
    groups = []

    def all_reduce(gradient: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        groups.append(group)
        gradient.add_(3)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    stage: Any = object()
    used = UsedParameters(
        nn.Linear(1, 1), {}, add_up=lambda counts: counts, num_ranks=2, always_exchanges=False, group=stage
    )
    gradient = torch.ones(())
    used._average([gradient])
    assert (gradient.item(), groups) == (2, [stage])
