"""The GPT recipe's model and corpus."""

from __future__ import annotations

import itertools

import pytest
import torch

from hocket.recipes.corpus import LEAST_BYTES, samples, source_files
from hocket.recipes.gpt import GPT, GPTConfig

SMALL = GPTConfig(context=16, width=32, num_layers=2, num_heads=4)


def test_a_position_depends_on_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(0, 256, (2, 17), dtype=torch.uint8)
    changed = tokens.clone()
    changed[:, 9] ^= 1
    before, after = model({"tokens": tokens}), model({"tokens": changed})
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_model_overfits_a_batch() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {"tokens": torch.randint(0, 256, (4, 17), dtype=torch.uint8)}
    losses = []
    for _ in range(40):
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1), "an untrained model should not prefer any byte"
    assert losses[-1] < 1.0


def test_the_demo_has_fifty_megabytes_of_state() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT().parameters())
    assert parameters * 4 * 3 >= 50_000_000, "weights and AdamW's two moments, in fp32"


def test_the_number_of_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="`width` is 30, which 4 heads cannot share"):
        GPTConfig(width=30, num_heads=4)


def test_the_corpus_is_large_enough_and_split_without_loss() -> None:
    assert sum(path.stat().st_size for path in source_files()) >= LEAST_BYTES
    text = b"".join(path.read_bytes() for path in source_files()[:3])
    cut = list(itertools.islice(samples(65), 20))
    assert [sample["id"] for sample in cut] == list(range(20))
    joined = bytes(cut[0]["tokens"]) + b"".join(bytes(sample["tokens"][1:]) for sample in cut[1:])
    assert joined == text[: len(joined)]
