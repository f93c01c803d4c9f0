"""ALiBi against the paper's formula, on models of transformers and on a user's own class."""

import math
import sys

import pytest
import torch
from torch import nn

from hocket.algos import (
    AlgorithmConfigError,
    Alibi,
    IncompatibleError,
    MissingLibraryError,
    SurgeryError,
    apply_alibi,
)
from hocket.algos.alibi import alibi_bias, alibi_slopes
from hocket.algos.alibi.alibi import shorten_sequences


@pytest.mark.parametrize("num_heads", [1, 2, 8, 12, 64, 71, 128])
def test_slopes_equal_the_papers_formula(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert (slopes.shape, slopes.dtype) == ((num_heads,), torch.float32)
    if num_heads & (num_heads - 1) == 0:
        expected = [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        torch.testing.assert_close(slopes, torch.tensor(expected))
    assert len(set(slopes.tolist())) == num_heads
    assert slopes.max() < 1


def test_slopes_of_twelve_heads_equal_those_of_the_authors_code() -> None:
    eight = [2 ** -(head + 1) for head in range(8)]
    more = [2 ** (-0.5 * (2 * head + 1)) for head in range(4)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(eight + more))


def attend_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Compute softmax(q k / sqrt(d) - slope * |i - j|) v with loops over heads."""
    heads = []
    for head, slope in enumerate(alibi_slopes(q.shape[1])):
        scores = q[:, head] @ k[:, head].transpose(1, 2) / math.sqrt(q.shape[-1])
        for i in range(q.shape[2]):
            for j in range(k.shape[2]):
                scores[:, i, j] -= slope * abs(i - j)
                if causal and j > i:
                    scores[:, i, j] = -math.inf
        heads.append(scores.softmax(-1) @ v[:, head])
    return torch.stack(heads, 1)


def test_the_bias_equals_the_formula() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    bias = alibi_bias(alibi_slopes(4), 6, 6)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, attend_by_hand(q, k, v, causal=False))
    # With cached keys, the queries are at the last positions.
    torch.testing.assert_close(alibi_bias(alibi_slopes(4), 2, 6), bias[:, 4:])


def models():
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=50, n_positions=16)
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**small, vocab_size=50, max_position_embeddings=16)
        ),
        "roberta": lambda: transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(**small, vocab_size=50, max_position_embeddings=18, pad_token_id=1)
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta"])
def test_alibi_works_in_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = models()[name]().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    report = apply_alibi(model, 32, optimizers=optimizer)
    assert len(report) == 2
    seen = []
    fused = nn.functional.scaled_dot_product_attention

    def check(q, k, v, *, attn_mask, dropout_p, scale):
        out = fused(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
        torch.testing.assert_close(out, attend_by_hand(q, k, v, causal=name == "gpt2"), atol=1e-5, rtol=1e-4)
        seen.append(q.shape)
        return out

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", check)
    ids = torch.randint(2, 50, (2, 24))  # longer than the model's position embeddings
    with torch.no_grad():
        out = model(input_ids=ids).logits
    assert len(seen) == 2
    assert out.shape == (2, 24, 50)
    monkeypatch.undo()
    # Padding is masked: its tokens do not change earlier outputs.
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[:, 20:] = 0
    other = ids.clone()
    other[:, 20:] = 3
    with torch.no_grad():
        first, second = (model(input_ids=x, attention_mask=mask).logits[:, :20] for x in (ids, other))
    torch.testing.assert_close(first, second)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    positions = [
        parameter for each, parameter in model.named_parameters() if "wpe" in each or "position_emb" in each
    ]
    assert positions
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert not held & {id(parameter) for parameter in positions}
    assert all(not parameter.requires_grad and not parameter.any() for parameter in positions)


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="max_sequence_length"):
        Alibi(0)
    with pytest.raises(AlgorithmConfigError, match="train_sequence_length_scaling"):
        Alibi(8, 0)
    with pytest.raises(SurgeryError, match="GPT2Attention"):
        apply_alibi(nn.Sequential(nn.Linear(2, 2)), 8)
    gpt2 = models()["gpt2"]()
    gpt2.transformer.wpe = nn.Identity()
    with pytest.raises(IncompatibleError, match="is a Identity"):
        apply_alibi(gpt2, 8)
    gpt2 = models()["gpt2"]()
    gpt2.extra = nn.Embedding(16, 16)
    gpt2.extra.weight = gpt2.transformer.wpe.weight
    with pytest.raises(IncompatibleError, match=r"shares its weight with `extra\.weight`"):
        apply_alibi(gpt2, 8)


def test_transformers_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = models()["gpt2"]()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingLibraryError, match="needs transformers 5 or newer"):
        apply_alibi(gpt2, 8)


def test_batches_are_cut_into_shorter_sequences() -> None:
    batch = {"input_ids": torch.arange(20).view(2, 10), "labels": torch.arange(20).view(2, 10), "note": "a"}
    cut = shorten_sequences(batch, 0.25, 16)
    assert cut["input_ids"].tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [10, 11],
        [12, 13],
        [14, 15],
        [16, 17],
    ]
    assert cut["note"] == "a"
    with pytest.raises(IncompatibleError, match="has 10 tokens"):
        shorten_sequences(batch, 0.5, 8)
    with pytest.raises(IncompatibleError, match=r"\['text'\]"):
        shorten_sequences({"text": ["a"]}, 0.5, 8)
