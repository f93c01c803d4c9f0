"""Low-rank factorization: the closest outputs, compared with a search by gradient and with other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.factorize import FactorizedConv2d, FactorizedLinear, factorize_conv2d, factorize_matrix


def sample(rows: int = 60, ins: int = 12, outs: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    # Columns of very different size, so that the closest weights do not give the closest outputs.
    inputs = torch.randn(rows, ins, generator=generator) * torch.logspace(-1, 1, ins)
    return (
        inputs,
        torch.randn(ins, outs, generator=generator),
        torch.randn(outs, generator=generator),
    )


def test_the_outputs_are_closer_than_those_of_the_closest_weights():
    inputs, weight, bias = sample()
    outputs = inputs @ weight + bias
    found = factorize_matrix(inputs, outputs, weight, None, bias, rank=3)
    plain = factorize_matrix(inputs, outputs, weight, None, bias, rank=3, n_iters=0)
    assert (found.rank, found.Wa.shape, found.Wb.shape) == (3, (12, 3), (3, 10))
    error = (inputs @ found.Wa @ found.Wb + found.bias - outputs).square().mean() / outputs.var()
    assert found.nmse == pytest.approx(error.item(), rel=1e-4)
    assert found.nmse < 0.5 * plain.nmse
    # A search by gradient from this solution finds no closer one.
    parts = [part.double().clone().requires_grad_() for part in (found.Wa, found.Wb, found.bias)]
    search = torch.optim.LBFGS(parts, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        search.zero_grad()
        far = inputs.double() @ parts[0] @ parts[1] + parts[2] - outputs.double()
        loss = far.square().mean() / outputs.double().var()
        loss.backward()
        return loss

    search.step(closure)
    assert closure().item() == pytest.approx(found.nmse, rel=1e-4)


@pytest.mark.parametrize("is_thin", [False, True])
def test_more_rank_is_never_worse_and_enough_is_exact(is_thin: bool):
    inputs, weight, bias = sample()
    first, second = (weight[:, :6], weight[:6]) if is_thin else (weight, None)
    outputs = inputs @ (first if second is None else first @ second) + bias
    errors = []
    for rank in (1, 3, 5, 8, 20):
        found = factorize_matrix(inputs, outputs, first, second, bias, rank=rank)
        errors.append(found.nmse)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9
    assert found.Wb is None
    if is_thin:  # the map has a lower rank already than requested
        kept = factorize_matrix(inputs, outputs, first, second, bias, rank=8)
        assert kept.Wa is first
        assert kept.rank == 6


def test_a_map_without_bias_gets_none_and_few_samples_determine_only_a_part():
    inputs, weight, _ = sample(rows=4)
    found = factorize_matrix(inputs, inputs @ weight, weight, rank=5)
    assert found.bias is None
    assert found.nmse < 1e-9
    assert found.Wa.shape == (12, 5)
    whole = factorize_matrix(inputs, inputs @ weight, weight, rank=99)
    torch.testing.assert_close(whole.Wa, weight, rtol=1e-4, atol=1e-4)
    with pytest.raises(AlgorithmConfigError, match=r"`X` has the shape \(4, 12\) and `Y` \(3, 10\)"):
        factorize_matrix(inputs, torch.ones(3, 10), weight)


def test_a_convolution_becomes_two_low_rank_ones():
    torch.manual_seed(4)
    conv = nn.Conv2d(8, 6, 3)
    images = torch.randn(3, 8, 9, 9)
    found = factorize_conv2d(images, conv.weight, None, conv.bias, rank=5)
    assert (found.Wa.shape, found.Wb.shape) == ((5, 8, 3, 3), (6, 5, 1, 1))
    outputs = nn.functional.conv2d(nn.functional.conv2d(images, found.Wa), found.Wb, found.bias)
    error = (outputs - conv(images)).square().mean() / conv(images).var()
    assert found.nmse == pytest.approx(error.item(), rel=1e-3)
    assert 0 < found.nmse < 0.3


@pytest.mark.parametrize("bias", [True, False])
def test_factorizing_a_factorized_layer_lowers_its_rank_and_changes_little(bias: bool):
    torch.manual_seed(4)
    inputs, images = torch.randn(50, 36), torch.randn(2, 36, 6, 6)
    linear = FactorizedLinear(36, 40, bias, latent_features=16)
    conv = FactorizedConv2d(36, 40, 3, latent_channels=16, bias=bias, padding=1)
    for layer, given in ((linear, inputs), (conv, images)):
        before, size = layer(given), 16
        for rank in (12, 8):
            layer.set_rank(given, rank)
            size = layer.latent_features if layer is linear else layer.latent_channels
            assert (size, layer.module0.weight.shape[0], layer.module1.weight.shape[1]) == (rank, rank, rank)
            assert (layer(given) - before).square().mean() < 0.5 * before.var()
        assert all(parameter.requires_grad for parameter in layer.parameters())
        for rank in (9, 39):
            with pytest.raises(AlgorithmConfigError, match=f"`rank` asks for {rank}.* only up to 8"):
                layer.set_rank(given, rank)
