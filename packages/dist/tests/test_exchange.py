"""Second derivatives, which exchanges between ranks do not compute, are refused by name."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hocket.dist import ModelError, provide
from hocket.dist.layout.tensor_parallelism.gradients import place_gradients
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.recipes.mixture import MixtureConfig, MixtureGPT
from support.standing_ranks import StandingRanks

PARTS = {"blocks.*.mlp_in": "colwise", "blocks.*.mlp_out": "rowwise"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp, without packed matrices": {"tp": {"degree": 2, "plan": PARTS}},
    "dp_shard, tp": {"dp_shard": 1, "tp": 2, "fsdp": {"mixed_precision": {"reduce_dtype": "fp64"}}},
    "sequence_parallel": {"tp": {"degree": 2, "sequence_parallel": True}},
    "cp": {"dp_shard": 1, "cp": 2},
    "ring": {"dp_shard": 1, "cp": {"degree": 2, "method": "ring"}},
    "ep": {"dp_shard": 2, "ep": 2},
}


def _differentiate(create_graph: bool) -> dict[str, str]:
    messages = {}
    for name, config in LAYOUTS.items():
        size = GPTConfig(context=4, width=8, num_layers=2, num_heads=2)
        model = MixtureGPT(MixtureConfig(gpt=size, num_experts=2)) if name == "ep" else GPT(size)
        batch = {"tokens": torch.arange(10).view(2, 5)}
        with provide(config, device="cpu", timeout_s=30) as parallelism:
            parallelism.lay_out(model)
            try:
                model.loss(model(batch), batch).backward(create_graph=create_graph)
            except ModelError as error:
                messages[name] = str(error)
    return messages


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_second_derivatives_are_refused_alike(two_ranks: StandingRanks) -> None:
    first, second = two_ranks.run(_differentiate, True)
    assert first == second
    assert first.keys() == LAYOUTS.keys()
    assert all(one.startswith("the backward pass has `create_graph=True`") for one in first.values())
    assert two_ranks.run(_differentiate, False) == [{}, {}]


def test_gradients_are_not_placed_for_integers(one_rank: None) -> None:
    """Such as the weights of a quantized layer, which torch lets nobody train."""
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Module()
    for name, value in (("codes", torch.ones(2, dtype=torch.int8)), ("scale", torch.ones(2))):
        cut = distribute_tensor(value, mesh, [Shard(0)])
        model.register_parameter(name, torch.nn.Parameter(cut, requires_grad=False))
    place_gradients(model)
    assert not any(one.requires_grad for one in model.parameters())
    assert model.scale._backward_hooks
    assert not model.codes._backward_hooks
