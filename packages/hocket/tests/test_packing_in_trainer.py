"""The trainer on packed rows: shares, exact counts of tokens, resume, and attention within each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hocket.stream import MDSWriter, PackedDataLoader, PackedDataset
from hocket.stream.packing import count_tokens
from hocket.trainer import DataSpec, Trainer
from hocket.trainer.testing import check_data_plan

LENGTHS = [1 + number * 5 % 24 for number in range(130)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a data set of sequences of different lengths."""
    with MDSWriter(columns={"tokens": "ndarray:uint16"}, out=tmp_path / "data", size_limit=900) as writer:
        for number, length in enumerate(LENGTHS):
            writer.write({"tokens": 1 + np.arange(number, number + length, dtype=np.uint16) % 50})
    return tmp_path / "data"


def packed(folder: Path, **options: Any) -> PackedDataLoader:
    """Return a loader of rows of 24 tokens."""
    return PackedDataLoader(
        PackedDataset(local=folder, length=24, window=32, global_batch_size=6, shuffle=True, **options)
    )


class Net(torch.nn.Module):
    """A model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 4)
        self.head = torch.nn.Linear(4, 64)
        self.seen: list[list[list[int]]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen.append(batch["input_ids"].tolist())
        return self.head(self.embedding(batch["input_ids"]))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )


def test_ranks_divide_the_rows_as_the_trainer_expects(folder: Path) -> None:
    check_data_plan(lambda rank, size: packed(folder, rank=rank, world_size=size), 3)


def test_a_run_counts_tokens_without_padding_and_resumes_in_a_window(folder: Path, tmp_path: Path) -> None:
    def train(duration: str, save_folder: Path) -> tuple[Net, Trainer]:
        torch.manual_seed(0)
        trainer = Trainer(
            model=(net := Net()),
            train_dataloader=DataSpec(packed(folder), get_num_tokens_in_batch=count_tokens),
            max_duration=duration,
            save_folder=save_folder,
            save_interval="4ba",
            autoresume=True,
            progress_bar=False,
            seed=3,
        )
        with trainer:
            trainer.fit()
        return net, trainer

    whole, trainer = train("2ep", tmp_path / "whole")
    assert trainer.state.timestamp.token == 2 * sum(LENGTHS)
    first, trainer = train("7ba", tmp_path / "parts")
    assert trainer.state.timestamp.token == sum(
        token > 0 for batch in first.seen for row in batch for token in row
    )
    rest, trainer = train("2ep", tmp_path / "parts")
    assert first.seen + rest.seen == whole.seen
    assert trainer.state.timestamp.token == 2 * sum(LENGTHS)
    for one, other in zip(whole.parameters(), rest.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_transformer_sees_each_packed_sequence_alone(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    batch = next(iter(packed(folder)))
    assert batch["sequence_ids"].max() > 1
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        for row, numbers in enumerate(batch["sequence_ids"]):
            for number in range(1, int(numbers.max()) + 1):
                where = numbers == number
                alone = model(input_ids=batch["input_ids"][row, where][None], use_cache=False).logits[0]
                torch.testing.assert_close(logits[row, where], alone, rtol=1e-4, atol=1e-5)
