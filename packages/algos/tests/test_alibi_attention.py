"""ALiBi's attention with both kernels, in bf16 and in Hocket's GPT, and the calls that raise."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import AlgorithmConfigError, Alibi, IncompatibleError, apply_alibi
from hocket.algos.alibi import AlibiAttention, alibi_bias, alibi_slopes, policy_registry
from support.methods import Attention, make_model

EXAMPLE = Path(__file__).parents[1] / "examples/own_attention.py"


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    bias = alibi_bias(alibi_slopes(q.shape[1]), q.shape[2], k.shape[2])
    if causal:
        later = torch.arange(k.shape[2])[None] > torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        bias = bias.masked_fill(later, float("-inf"))
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_kernels_compute_the_formula(kernel: str) -> None:
    q, k, v = torch.randn(3, 2, 12, 20, 8)
    attention = AlibiAttention(12, 32, kernel=kernel)
    torch.testing.assert_close(attention(q, k, v), reference(q, k, v, causal=False))
    last = q[:, :, -3:]  # as with cached keys of earlier tokens
    torch.testing.assert_close(attention(last, k, v, is_causal=True), reference(last, k, v, causal=True))


def test_masks_are_added_to_the_bias_and_cached_biases_are_not_mixed_up() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    attention = AlibiAttention(4, 8)
    seen = torch.rand(2, 1, 6, 6) > 0.3
    seen[..., 0] = True
    added = torch.zeros(2, 1, 6, 6).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(attention(q, k, v, seen), attention(q, k, v, added))
    expected = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=added + alibi_bias(alibi_slopes(4), 6, 6)
    )
    torch.testing.assert_close(attention(q, k, v, seen), expected)
    with torch.inference_mode():
        attention(q, k, v, is_causal=True)
    q.requires_grad_()
    attention(q, k, v, is_causal=True).sum().backward()
    assert q.grad is not None


def test_slopes_stay_in_fp32_when_the_model_goes_to_bf16() -> None:
    attention = AlibiAttention(12, 8).bfloat16()
    assert attention.slopes.dtype == torch.float32
    assert torch.equal(attention.slopes, alibi_slopes(12))
    assert not torch.equal(alibi_slopes(12).bfloat16().float(), alibi_slopes(12))
    assert attention.state_dict() == {}
    q = torch.randn(1, 12, 4, 8, dtype=torch.bfloat16)
    assert attention(q, q, q).dtype == torch.bfloat16


def test_hockets_gpt_works_with_both_kernels_and_longer_text() -> None:
    recipes = pytest.importorskip("hocket.recipes.gpt", reason="needs the package hocket")
    torch.manual_seed(0)
    outputs = []
    batch = {"tokens": torch.randint(0, 256, (2, 25), dtype=torch.uint8)}
    for kernel in ("sdpa", "flex"):
        torch.manual_seed(1)
        model = recipes.GPT(recipes.GPTConfig(context=16, width=24, num_layers=2, num_heads=3))
        report = apply_alibi(model, 32, torch.optim.SGD(model.parameters()), kernel=kernel)
        assert report.counts == {"Block": 2}
        assert [change.name for change in report.optimizer_changes] == ["position_embedding.weight"]
        with torch.no_grad():
            outputs.append(model(batch))
            # Causal: a later byte does not change earlier outputs.
            other = {"tokens": batch["tokens"].clone()}
            other["tokens"][:, 20:] = 7
            torch.testing.assert_close(model(other)[:, :20], outputs[-1][:, :20])
    torch.testing.assert_close(*outputs)
    cut = Alibi(32, 0.5, input_key="tokens")
    assert cut.input_key == "tokens"


def test_transformers_models_work_with_flex_attention() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=8, attn_pdrop=0.0
    )
    ids, outputs = torch.randint(0, 20, (2, 12)), []
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    for kernel in ("sdpa", "flex"):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config).eval()
        apply_alibi(model, 16, kernel=kernel)
        with torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=mask).logits)
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1, :8], outputs[1][1, :8])


def test_invalid_calls_raise() -> None:
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(IncompatibleError, match="has 6 tokens, and `max_sequence_length` is 5"):
        AlibiAttention(4, 5)(q, q, q)
    with pytest.raises(IncompatibleError, match="made for 8 heads"):
        AlibiAttention(8, 8)(q, q, q)
    with pytest.raises(AlgorithmConfigError, match="flash"):
        AlibiAttention(8, 8, kernel="flash")
    flex = AlibiAttention(4, 8, kernel="flex")
    with pytest.raises(IncompatibleError, match="no dropout"):
        flex(q, q, q, dropout_p=0.1)
    with pytest.raises(IncompatibleError, match="BlockMask"):
        flex(q, q, q, torch.zeros(6, 6))
    with pytest.raises(IncompatibleError, match="no backward pass on a CPU"):
        flex(q.requires_grad_(), q, q)


def test_a_model_too_large_for_memory_raises_before_training() -> None:
    with pytest.raises(IncompatibleError, match=r"bias of `Alibi` for 2 heads and 10000000 tokens .* GiB"):
        apply_alibi(make_model("transformer"), 10_000_000)
    with pytest.raises(
        IncompatibleError, match=r"position embedding of 1000000000000 rows for `Alibi` .* GiB"
    ):
        apply_alibi(make_model("transformer"), 10**12, kernel="flex")


def test_models_without_a_single_causal_sequence_raise() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 8}
    bart = transformers.BartModel(transformers.BartConfig(**small, **heads, encoder_ffn_dim=16))
    with pytest.raises(IncompatibleError, match="is an encoder-decoder"):
        apply_alibi(bart, 8)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=8)
    for name, value, message in [
        ("is_causal", False, r"not causal \(`is_causal` is False\)"),
        ("num_heads", 3, "3 heads and a width of 16"),
        ("config", None, "needs `config`"),
        ("is_cross_attention", True, "is cross-attention"),
    ]:
        gpt2: Any = transformers.GPT2Model(config)
        setattr(gpt2.h[0].attn, name, value)
        with pytest.raises(IncompatibleError, match=message):
            apply_alibi(gpt2, 8)
    without = make_model("transformer")
    del without.position_embedding
    with pytest.raises(IncompatibleError, match="found no position embeddings"):
        apply_alibi(without, 8)


def test_a_model_without_position_embeddings_is_trained_on_request() -> None:
    model = nn.Sequential(NoModule(8, 2))
    policy_registry.register(NoModule)(lambda module, index, length: module)
    state: Any = SimpleNamespace(model=model, optimizers=[])
    assert len(Alibi(max_sequence_length=8, position_embeddings=False).operate(state)) == 1
    with pytest.raises(IncompatibleError, match="pass `position_embeddings=False`"):
        Alibi(max_sequence_length=8).operate(state)


class NoModule(Attention):
    """An attention module whose policy uses only the slopes."""


def test_flex_needs_a_policy_that_uses_the_kernel() -> None:
    policy_registry.register(NoModule)(lambda module, index, length: module)
    model = nn.Sequential(NoModule(8, 2))
    with pytest.raises(IncompatibleError, match="`kernel='flex'` needs a policy"):
        apply_alibi(model, 8, kernel="flex", position_embeddings=False)


def test_the_example_of_a_users_own_attention_learns() -> None:
    spec = importlib.util.spec_from_file_location("own_attention", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main()
    assert losses["after"] < losses["before"] / 4
