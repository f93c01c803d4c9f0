"""`composer.algorithms.<method>`: layers and optimizers that scripts make by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hocket.compat.composer import methods
from hocket.compat.composer.methods import SAMOptimizer, apply_blurpool
from hocket.trainer.errors import TrainerConfigError


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 4, generator=generator), torch.arange(8) % 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    inputs, targets = batch()

    def closure() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(optimizer.step(closure).item())
    return losses


def test_sam_optimizer_takes_the_gradient_at_the_worst_point_nearby():
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    expected, inputs = copy.deepcopy(model), batch()[0]
    loss = nn.functional.cross_entropy(expected(inputs), batch()[1])
    gradients = torch.autograd.grad(loss, list(expected.parameters()))
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    worst = copy.deepcopy(expected)
    with torch.no_grad():
        for parameter, gradient in zip(worst.parameters(), gradients, strict=True):
            parameter += 0.5 * gradient / norm
    there = torch.autograd.grad(
        nn.functional.cross_entropy(worst(inputs), batch()[1]), list(worst.parameters())
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SAMOptimizer(base, rho=0.5)
    assert optimizer.param_groups is base.param_groups
    assert train(model, optimizer, 1) == [loss.item()]
    for parameter, before, gradient in zip(model.parameters(), expected.parameters(), there, strict=True):
        torch.testing.assert_close(parameter, before - 0.1 * gradient)


def test_sam_optimizer_is_plain_between_intervals_and_needs_a_closure():
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    plain = copy.deepcopy(model)
    sam = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, interval=3)
    assert train(model, sam, 2) == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=0)
    train(model, sam, 1)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    assert not torch.equal(model.weight, plain.weight)
    with pytest.raises(TrainerConfigError, match="needs a closure"):
        sam.step()
    with pytest.raises(TrainerConfigError, match="`interval` 0"):
        SAMOptimizer(torch.optim.SGD(model.parameters()), interval=0)


def test_blur_layers_are_drop_in_replacements_for_torchs():
    image = torch.randn(2, 16, 7, 8)
    for stride, blur_first in ((1, True), (2, True), (2, False)):
        settings = {"kernel_size": 3, "stride": stride, "padding": 1}
        blurred = methods.BlurConv2d(16, 4, **settings, blur_first=blur_first)
        assert blurred(image).shape == nn.Conv2d(16, 4, **settings)(image).shape
    conv = nn.Conv2d(16, 4, 3, stride=2)
    around = methods.BlurConv2d.from_conv2d(conv)
    assert around.conv is conv
    model = nn.Sequential(conv, nn.MaxPool2d(2))
    apply_blurpool(model)
    assert [type(one) for one in model] == [methods.BlurConv2d, methods.BlurMaxPool2d]
    pooled = methods.blurmax_pool2d(image, kernel_size=2, stride=2)
    torch.testing.assert_close(pooled, methods.BlurMaxPool2d(2, 2)(image))
    assert methods.BlurPool2d(16, 2)(image).shape == (2, 16, 4, 4)
    torch.testing.assert_close(methods.BlurPool2d(stride=1)(image), methods.blur_2d(image))
