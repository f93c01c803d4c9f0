"""Plain modules as models: how `forward` and the loss function are given a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from hocket.trainer.step.losses.losses import as_model


class Entries(nn.Module):
    """Takes the entries of a batch by any name; computes the loss if it is asked to."""

    def __init__(self, *, has_loss=False):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(5, 3)
        self.has_loss = has_loss

    def forward(self, **batch):
        logits = self.head(batch["x"])
        return {"loss": functional.cross_entropy(logits, batch["labels"])} if self.has_loss else logits


def by_targets(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def by_batch(outputs, batch):
    return functional.cross_entropy(outputs, batch["labels"])


def by_entries(outputs, **batch):
    return functional.cross_entropy(outputs, batch["labels"])


@pytest.mark.parametrize("loss_fn", [by_targets, by_batch, by_entries, None])
def test_a_forward_of_all_entries_gets_the_entries(loss_fn):
    batch = {"x": torch.randn(4, 5), "labels": torch.tensor([0, 1, 2, 0])}
    module = Entries(has_loss=loss_fn is None)
    model = as_model(module, loss_fn)
    expected = functional.cross_entropy(module.head(batch["x"]), batch["labels"])
    assert torch.equal(model.loss(model(batch), batch), expected)
