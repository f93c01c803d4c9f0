"""Methods that replace linear layers, on modules of torch that read the weights of their linear layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import apply_factorization, apply_float8, apply_lora, apply_qat
from hocket.algos.surgery import is_plain_linear


def factorize(model: nn.Module) -> Any:
    return apply_factorization(model, min_features=8, latent_features=4)


def qat(model: nn.Module) -> Any:
    pytest.importorskip("torchao", reason="needs torchao (group algos)")
    return apply_qat(model)


def float8(model: nn.Module) -> Any:
    pytest.importorskip("torchao", reason="needs torchao (group algos)")
    return apply_float8(model, emulate=True)


def lora(model: nn.Module) -> Any:
    pytest.importorskip("peft", reason="needs peft (group algos)")
    report = apply_lora(model, 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return report


@pytest.mark.parametrize("apply", [factorize, qat, float8, lora])
def test_torchs_transformer_computes_the_same_in_training_and_evaluation(
    apply: Callable[[nn.Module], Any],
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2))
    x, padding = torch.randn(2, 3, 64), torch.tensor([[False] * 3, [False, False, True]])
    plain = model[0](x, src_key_padding_mask=padding)
    apply(model)
    assert isinstance(model[0].layers[0].self_attn.out_proj, nn.Linear)  # attention reads its weight
    trained = model[0](x, src_key_padding_mask=padding)
    model.eval()
    with torch.no_grad():
        evaluated = model[0](x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated[~padding], trained[~padding])
    assert not torch.allclose(trained[~padding], plain[~padding], rtol=1e-6, atol=1e-6)


def test_only_linear_layers_themselves_are_plain() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.forward = lambda input: input  # type: ignore[method-assign, assignment]  # noqa: A006
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    attention = nn.MultiheadAttention(4, 2)
    assert is_plain_linear(nn.Linear(2, 2))
    others = (Own(2, 2), hooked, parametrized, attention.out_proj, nn.Conv1d(2, 2, 1))
    assert not any(map(is_plain_linear, others))
