"""Experts compute the same by each kind of product, and the terms of routers are of one forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hocket.recipes.gpt import GPTConfig
from hocket.recipes.mixture import Experts, Mixture, MixtureConfig, MixtureGPT, can_group


def _experts(num_experts: int, width: int, dtype: torch.dtype) -> Experts:
    torch.manual_seed(0)
    made = Experts(num_experts, width).to(dtype)
    for one in made.parameters():
        torch.nn.init.normal_(one, std=0.3)
    return made


def _gradients(made: Experts, rows: Tensor, chosen: Tensor, cotangent: Tensor) -> list[Tensor]:
    """Return the results of the experts, and the gradients of rows, weights and both matrices."""
    made.zero_grad()
    inputs = [
        rows.clone().requires_grad_(),
        torch.rand(chosen.shape, generator=_generator()).requires_grad_(),
    ]
    out = made(inputs[0], chosen, inputs[1])
    (out * cotangent).sum().backward()
    found = [one.grad for one in (*inputs, made.up, made.down)]
    assert all(one is not None for one in found)
    return [out.detach(), *(one.clone() for one in found if one is not None)]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="grouped products on the CPU need torch 2.11")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_products_are_those_of_each_expert(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _experts(6, 16, dtype)
    rows = torch.randn(40, 16, generator=_generator()).to(dtype)
    chosen = torch.randint(0, 5, (40, 2), generator=_generator())  # no row for the last expert
    cotangent = torch.randn(40, 16, generator=_generator()).to(dtype)
    assert can_group(rows, made.up, made.down)
    grouped = _gradients(made, rows, chosen, cotangent)
    monkeypatch.setattr("hocket.recipes.mixture.can_group", lambda *_: False)
    each = _gradients(made, rows, chosen, cotangent)
    for one, other in zip(grouped, each, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * other.norm()
    assert not grouped[-1][5].any(), "zeros for the expert without rows, and not None"


@pytest.mark.skipif(torch.__version__ < "2.11", reason="grouped products on the CPU need torch 2.11")
def test_grouped_products_have_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = _experts(4, 16, torch.float32), torch.randn(12, 16, generator=_generator())
    chosen, weights = torch.randint(0, 4, (12, 2), generator=_generator()), torch.ones(12, 2)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        assert can_group(rows, made.up, made.down)
        found.append(made._compute_grouped(rows, torch.tensor([3, 3, 3, 3])))
        grouped = made(rows, chosen, weights)
        monkeypatch.setattr("hocket.recipes.mixture.can_group", lambda *_: False)
        found.append(made._compute_each(rows, torch.tensor([3, 3, 3, 3])))
        each = made(rows, chosen, weights)
    assert [one.dtype for one in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(grouped, each, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("width", "num_rows", "dtype"),
    [(10, 4, torch.float32), (16, 0, torch.float32), (16, 4, torch.float64), (4, 4, torch.bfloat16)],
)
def test_what_cannot_be_grouped_is_computed_by_each_expert(
    width: int, num_rows: int, dtype: torch.dtype
) -> None:
    made, rows = _experts(4, width, dtype), torch.randn(num_rows, width).to(dtype)
    assert not can_group(rows, made.up, made.down)
    out = made(rows, torch.zeros(num_rows, 1, dtype=torch.int64), torch.ones(num_rows, 1, dtype=dtype))
    assert out.shape == rows.shape


def test_the_term_of_the_routers_is_added_to_the_loss() -> None:
    losses = []
    for weight in (0.0, 0.01):
        torch.manual_seed(0)
        size = GPTConfig(context=8, width=8, num_layers=2, num_heads=2)
        model = MixtureGPT(MixtureConfig(gpt=size, aux_loss=weight))
        batch = {"tokens": torch.arange(18, dtype=torch.uint8).view(2, 9)}
        losses.append(model.loss(model(batch), batch).item())
    assert losses[1] - losses[0] == pytest.approx(2 * 0.01, rel=0.1)  # 1 a block where the load is even


def test_recomputed_terms_of_the_routers_are_not_kept() -> None:
    torch.manual_seed(0)
    mixture = Mixture(MixtureConfig(gpt=GPTConfig(width=8, num_heads=2), aux_loss=0.01))
    x = torch.randn(2, 4, 8, requires_grad=True)
    out = checkpoint(mixture, x, use_reentrant=False)
    term = mixture.aux
    assert term is not None
    (out.sum() + term).backward()
    assert mixture.aux is term
    assert mixture.counts.sum() == 2 * 4 * mixture.num_chosen
