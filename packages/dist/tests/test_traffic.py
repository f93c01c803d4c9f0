"""The bytes that a layout is said to send are those that its ranks send."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.dist import provide
from hocket.dist.memory.layouts import LayoutEstimator, Machines
from hocket.dist.memory.proposal import propose_only
from hocket.recipes.gpt import GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from support.standing_ranks import StandingRanks

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 4": {"dp_shard": 4, "ep": 4},
    "dp_shard 4 × ep 2": {"dp_shard": 4, "ep": 2},
    "dp_replicate 2 × ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard 2 × cp 2": {"dp_shard": 2, "cp": 2},
    "dp_shard 2 × cp 2 × ep 4": {"dp_shard": 2, "cp": 2, "ep": 4},
}


def _model(*, is_even: bool = False) -> MixtureGPT:
    size = GPTConfig(context=16, width=32, num_layers=2, num_heads=4)
    model = MixtureGPT(MixtureConfig(gpt=size, num_experts=4))
    if is_even:  # all rows choose the same experts, one on each half of the ranks
        for block in model.blocks:
            nn.init.zeros_(block.mixture.router.weight)  # type: ignore[union-attr, arg-type]
            block.mixture.bias.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))  # type: ignore[union-attr, operator]
    return model


def _batch() -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(2, 17, dtype=torch.uint8)}


def _sent(config: dict[str, Any]) -> int:
    """Return the bytes of activations that this rank sends to others by all-to-all in a step."""
    total = 0
    exchange = dist.all_to_all_single

    def count(
        output: torch.Tensor, given: torch.Tensor, come: Any = None, to: Any = None, group: Any = None
    ) -> Any:
        nonlocal total
        if given.is_floating_point():
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            rows = to or [len(given) // size] * size
            total += (sum(rows) - rows[rank]) * given[:1].nbytes
        return exchange(output, given, come, to, group=group)

    with provide(config, device="cpu", timeout_s=60) as parallelism:
        model: Any = parallelism.lay_out(_model(is_even=True))
        model(_batch()).sum().backward()  # the first pass also tries a block with parts of the sequence
        dist.all_to_all_single = count
        try:
            model(_batch()).sum().backward()
        finally:
            dist.all_to_all_single = exchange
    return total


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_the_rows_and_heads_that_were_estimated(four_ranks: StandingRanks, name: str) -> None:
    with torch.device("meta"):
        model = _model()
    estimator = LayoutEstimator(model, _batch(), Machines(ranks=4, ranks_each=4))
    (found,) = propose_only(estimator, LAYOUTS[name], None).best
    # The end of the blocks is gathered, and the gradients of their beginning, by another collective.
    gathered = 2 * (2 * 16 * 32 * 4) / 2 if "cp" in LAYOUTS[name] else 0
    measured = sum(four_ranks.run(_sent, LAYOUTS[name])) / 4
    assert measured == pytest.approx(found.sent.get("ep", 0) + found.sent.get("cp", 0) - gathered)
