"""Labels of one byte, among which the ignored label -100 would be 156."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from hocket.trainer import ComposerModel, Trainer
from hocket.trainer.data.batches import loss_weights
from hocket.trainer.loggers import InMemoryLogger
from hocket.trainer.loss.ignored_label import is_counted
from hocket.trainer.metrics import LanguageCrossEntropy, MaskedAccuracy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64, torch.bool])
def test_a_label_that_the_dtype_does_not_hold_is_in_no_place(dtype: torch.dtype) -> None:
    labels = torch.tensor([156, 1, 0, -100]).to(dtype)
    expected = [int(label) != -100 for label in labels.tolist()]
    assert is_counted(labels, -100).tolist() == expected
    assert is_counted(labels, 255).all() == (dtype is not torch.uint8 or 255 not in labels.tolist())


def test_every_byte_weighs() -> None:
    bytes_ = torch.full((2, 5), 156, dtype=torch.uint8)
    assert loss_weights({"labels": bytes_}) == [5, 5]
    cross_entropy, accuracy = LanguageCrossEntropy(), MaskedAccuracy()
    logits = torch.zeros(2, 5, 256)
    cross_entropy.update(logits, bytes_)
    accuracy.update(logits, bytes_)
    assert cross_entropy.count == accuracy.count == 10


class NextByte(ComposerModel):
    """Predicts the next byte, with torch's loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(256, 256)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.embed(batch["tokens"][:, :-1].long())

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].long().flatten())


def train(microbatch: int) -> tuple[list[float], torch.Tensor]:
    """Train two steps on bytes of which a row is 156 alone; return the losses and the parameters."""
    tokens = torch.arange(64).reshape(8, 8).to(torch.uint8)
    tokens[1] = 156
    memory = InMemoryLogger()
    with Trainer(
        model=NextByte(),
        train_dataloader=[{"tokens": tokens}] * 2,
        device_train_microbatch_size=microbatch,
        max_duration="2ba",
        loggers=memory,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        weight = trainer.state.model.embed.weight.detach().clone()
    return [float(value) for _, value in memory.data["loss/train/total"]], weight


def test_microbatches_of_bytes_give_the_update_of_the_whole_batch() -> None:
    losses, weight = train(8)
    parts, weight_of_parts = train(1)
    assert parts == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(weight_of_parts, weight, rtol=1e-5, atol=1e-6)
