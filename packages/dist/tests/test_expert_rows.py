"""What is counted for a stack of experts on the meta device is what it saves with values."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.memory.activations import measure_forward
from hocket.recipes.gpt import Block, GPTConfig
from hocket.recipes.mixture import Experts, MixtureBlock, MixtureConfig, MixtureGPT

ROWS, WIDTH, NUM_EXPERTS, CHOSEN = 64, 32, 8, 2


class Called(nn.Module):
    """A model that is a stack of experts, with as many rows for each."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = batch["rows"]
        chosen = torch.arange(ROWS * CHOSEN, device="cpu").view(ROWS, CHOSEN) % NUM_EXPERTS
        out: torch.Tensor = self.stack(rows, chosen, batch["weights"])
        return out


def _batch() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.ones(ROWS, WIDTH, requires_grad=True),
        "weights": torch.ones(ROWS, CHOSEN, requires_grad=True),
    }


def _saved(model: nn.Module) -> int:
    batch = _batch()
    tensors = [*model.parameters(), batch["weights"]]
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    given = set(kept)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in given)


def _stacks() -> dict[str, Callable[[], nn.Module]]:
    made: dict[str, Callable[[], nn.Module]] = {"recipe": lambda: Experts(NUM_EXPERTS, WIDTH)}
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    for kind in ("eager", "grouped_mm"):
        config = mixtral.MixtralConfig(hidden_size=WIDTH, intermediate_size=48, num_local_experts=NUM_EXPERTS)
        config._experts_implementation = kind
        made[f"mixtral, {kind}"] = lambda config=config: mixtral.MixtralExperts(config)
    return made


@pytest.mark.parametrize("name", ["recipe", "mixtral, eager", "mixtral, grouped_mm"])
def test_a_stack_saves_what_was_counted(name: str) -> None:
    model = Called(_stacks()[name]())
    for one in model.parameters():
        nn.init.ones_(one)
    counted = measure_forward(model, _batch(), FSDPConfig(), loss=lambda out, _: out).whole.saved
    # The weights are counted with what computes them.
    counted -= ROWS * CHOSEN * 4
    assert counted == pytest.approx(_saved(model), rel=0.02)


class MaybeDense(MixtureBlock):
    """A block with experts, or with the perceptron of a block without them."""

    def __init__(self, config: MixtureConfig, *, is_dense: bool) -> None:
        super().__init__(config)
        self.dense = Block(config.gpt) if is_dense else None
        if is_dense:
            del self.mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) if self.dense is None else self.dense(x)
        return out


class DenseFirst(MixtureGPT):
    """A mixture whose first block has no experts."""

    def _make_block(self) -> nn.Module:
        self._made = getattr(self, "_made", 0) + 1
        return MaybeDense(self.mixture_config, is_dense=self._made == 1)


def test_rows_and_operations_of_experts_are_those_of_their_blocks() -> None:
    size = GPTConfig(context=32, width=64, num_layers=3, num_heads=4)
    with torch.device("meta"):
        model = DenseFirst(MixtureConfig(gpt=size, num_experts=4))
    batch = {"tokens": torch.zeros(2, 33, dtype=torch.uint8)}
    found = measure_forward(model, batch, FSDPConfig())
    assert [part.routed for part in found.parts.values()] == [0, 2 * 32 * 2 * 64 * 4, 2 * 32 * 2 * 64 * 4]
    dense, mixed, _ = found.parts.values()
    # Two experts of each position, each as large as the perceptron; and the router.
    assert mixed.flops - dense.flops == 2 * 64 * (8 * 64 * 64) + 2 * 64 * (64 * 4)
    assert found.whole.flops == sum(part.flops for part in found.parts.values()) + 2 * 64 * 64 * 256
    assert dense.attended == 4 * 2 * 32 * 64 * 4, "queries, keys, values and results"
