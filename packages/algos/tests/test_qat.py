"""Quantization-aware training: rounding, gradients, and the conversion after the training."""

from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import (
    QAT,
    AlgorithmConfigError,
    Float8,
    LoRA,
    MissingLibraryError,
    SurgeryError,
    apply_lora,
    apply_qat,
    convert_qat,
    libraries,
)
from hocket.trainer.errors import TrainerConfigError
from support.methods import make_model, train

pytest.importorskip("torchao", reason="needs torchao (group algos)")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 30), nn.ReLU(), nn.Linear(30, 4))


@pytest.mark.parametrize("scheme", ["int8-int4", "int4", "int8"])
def test_training_computes_the_outputs_of_the_quantized_model(scheme: Any) -> None:
    model, x = _net(), torch.randn(8, 64)
    plain = model(x)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report = apply_qat(model, scheme, 32, optimizer)
    assert [one.names[0] for one in report] == ["0", "2"]
    assert list(report.skipped) == ["4"], "32 does not divide its 30 features"
    assert [id(one) for one in model.parameters()] == [id(one) for one in parameters]
    rounded = model(x)
    distance = (rounded - plain).norm() / plain.norm()
    assert (0.01 if scheme != "int8" else 0.0005) < distance < 0.5
    rounded.sum().backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in parameters)
    optimizer.step()
    expected = model(x)
    assert convert_qat(model, scheme, 32) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(SurgeryError, match="no layer that was prepared"):
        convert_qat(_net())


def test_a_torchao_configuration_is_accepted() -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis

    model = _net()
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerAxis(0))
    assert len(apply_qat(model, config)) == 3


def test_adapters_stay_in_full_precision() -> None:
    pytest.importorskip("peft", reason="needs peft (group algos)")
    model = _net()
    apply_lora(model, r=32)
    report = apply_qat(model, "int4", 32)
    assert [one.names[0] for one in report] == ["0.base_layer", "2.base_layer"]


def test_checkpoints_load_into_the_model_without_qat(tmp_path: Any) -> None:
    trained, _ = train(["QAT"], steps=2, save_folder=tmp_path, save_interval="2ba")
    assert trained.keys() == make_model("transformer").state_dict().keys()


def test_misuse_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AlgorithmConfigError, match="`scheme` is 'int3'; expected one of `int8-int4`"):
        QAT("int3")
    with pytest.raises(AlgorithmConfigError, match="`group_size` is 0"):
        QAT(group_size=0)
    with pytest.raises(SurgeryError, match="QAT replaced nothing"):
        apply_qat(_net(), group_size=37)
    for other in (QAT(), Float8(emulate=True)):
        with pytest.raises(TrainerConfigError, match=r"cannot be used together: .*in its own way"):
            train([], kind="transformer", algorithms=[QAT(group_size=8), other])
    train([], kind="transformer", steps=1, algorithms=[QAT(group_size=8), LoRA(2)])
    monkeypatch.setitem(libraries.OLDEST, "torchao", (99, 0))
    with pytest.raises(MissingLibraryError, match=r"`QAT` needs `torchao` 99\.0 or newer"):
        apply_qat(_net())
