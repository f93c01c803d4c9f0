"""Float8 training: emulated on any device; hardware without float8 raises unless it is emulated."""

from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import AlgorithmConfigError, Float8, IncompatibleError, SurgeryError, apply_float8
from support.methods import train

pytest.importorskip("torchao", reason="needs torchao (group algos)")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_rounded_in_forward_and_backward(recipe: Any) -> None:
    model, x, towards = _net(), torch.randn(16, 64), torch.randn(16, 4)
    plain = model(x)
    (plain * towards).sum().backward()
    gradient = model[0].weight.grad
    model.zero_grad()
    parameters = [id(one) for one in model.parameters()]
    report = apply_float8(model, recipe, emulate=True)
    assert [one.names[0] for one in report] == ["0", "2"]
    assert list(report.skipped) == ["4"], "16 does not divide its 4 features"
    assert [id(one) for one in model.parameters()] == parameters
    rounded = model(x)
    assert 1e-4 < (rounded - plain).norm() / plain.norm() < 0.2
    (rounded * towards).sum().backward()
    assert 1e-4 < (model[0].weight.grad - gradient).norm() / gradient.norm() < 0.3


def test_hardware_without_float8_raises_when_the_trainer_is_built() -> None:
    message = r"`Float8\('tensorwise'\)` needs a GPU with float8 .*but the model is on `cpu`.*`emulate=True`"
    with pytest.raises(IncompatibleError, match=message):
        train([], kind="transformer", algorithms=[Float8()])
    with pytest.raises(IncompatibleError, match="but the model is on `cpu`"):
        apply_float8(_net())


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.algos.float8.float8 import _check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(IncompatibleError, match=r"NVIDIA A100 of compute capability \(8, 0\)"):
        _check_device(torch.device("cuda", 0), "rowwise", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _check_device(torch.device("cuda", 0), "rowwise", False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_give_the_results_of_the_emulation(recipe: Any) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    models = [_net().to("cuda", torch.bfloat16) for _ in range(2)]
    apply_float8(models[0], recipe)
    apply_float8(models[1], recipe, emulate=True)
    torch.testing.assert_close(models[0](x), models[1](x), atol=2e-2, rtol=2e-2)


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="`recipe` is 'blockwise'; expected one of `tensorwise`"):
        Float8("blockwise")  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match="Float8 replaced nothing"):
        apply_float8(nn.Sequential(nn.Linear(10, 10)), emulate=True)
