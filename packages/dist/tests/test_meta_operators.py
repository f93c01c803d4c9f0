"""Operators on the meta device give and save what they do in training."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.memory.activations import measure_forward
from hocket.dist.memory.meta_operators import KnownIndices


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
