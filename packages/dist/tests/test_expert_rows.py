"""What is counted for a stack of experts on the meta device is what it saves with values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.memory.activations import measure_forward
from hocket.dist.memory.expert_rows import KnownIndices
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


def test_known_numbers_stay_known_beside_tensors_without_values() -> None:
    with KnownIndices():
        known = torch.arange(6, device="meta") % 3
        rows = torch.empty(6, 4, device="meta")
        assert rows[torch.where(known == 1)[0]].shape == (2, 4)
        assert torch.bincount(torch.empty(6, dtype=torch.int64, device="meta"), minlength=3).shape == (3,)
        with pytest.raises(NotImplementedError, match="Give `minlength`"):
            torch.bincount(torch.empty(6, dtype=torch.int64, device="meta"))
        with pytest.raises(NotImplementedError, match="into a tensor that has values"):
            known += torch.empty(6, dtype=torch.int64, device="meta")
        unknown: Any = torch.empty(6, device="meta")
        with pytest.raises((NotImplementedError, RuntimeError)):
            rows[unknown > 0]


@pytest.mark.parametrize("kind", ["causal", "masked", "few heads of keys"])
def test_attention_saves_what_the_kernel_saves(kind: str) -> None:
    shapes = [(2, 8, 96, 16), *[(2, 2 if "few" in kind else 8, 96, 16)] * 2]
    options: dict[str, Any] = {"is_causal": True}
    if kind == "masked":
        options = {"attn_mask": torch.ones(96, 96, dtype=torch.bool)}
    if "few" in kind:
        options["enable_gqa"] = True

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out = nn.functional.scaled_dot_product_attention(
                *(one * batch["one"] for one in self.given), **options
            )
            return out.transpose(1, 2).reshape(2, 96, -1).square()

    batch = {"one": torch.ones(())}
    found = measure_forward(Attention(), batch, FSDPConfig(), loss=lambda out, _: out).whole
    model, kept = Attention(), dict[int, int]()
    given = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(batch)
    assert found.saved == pytest.approx(
        sum(size for place, size in kept.items() if place not in given), rel=0.01
    )
    assert found.flops == 4 * 2 * 8 * 96 * 96 * 16
    assert out.grad_fn is not None
