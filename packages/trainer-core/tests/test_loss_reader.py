"""Reading losses: which denominators are found, and which losses have none that can be found."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from hocket.trainer.loss import soft_cross_entropy
from hocket.trainer.step.losses.loss_reader import LossReader

LABELS = torch.tensor([[1, 2, 0], [0, 0, 3], [2, 1, 1], [3, 0, 0]])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def outputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, 3, generator=generator, requires_grad=True) * 1.0  # no leaf, as outputs are none


def rule_of(function):
    x = outputs()
    with LossReader() as reader:
        loss = function(x, LABELS)
    return reader.rule_of(loss, {"x": x, "y": LABELS}, 4)


WEIGHED = {
    "ignore index": (lambda x, y: functional.cross_entropy(x, y, ignore_index=0), [2, 1, 3, 1]),
    "shifted": (lambda x, y: functional.cross_entropy(x[:, :, :-1], y[:, 1:], ignore_index=0), [1, 1, 2, 0]),
    "transposed": (
        lambda x, y: functional.cross_entropy(
            x.permute(2, 0, 1).flatten(0, 1), y.T.flatten(), ignore_index=0
        ),
        [2, 1, 3, 1],
    ),
    "class weights": (lambda x, y: nn.CrossEntropyLoss(WEIGHTS, ignore_index=0)(x, y), [5, 4, 7, 4]),
    "probabilities": (
        lambda x, y: functional.cross_entropy(x, functional.one_hot(y, 4).movedim(2, 1).float()),
        [3, 3, 3, 3],
    ),
    "legacy arguments": (lambda x, y: functional.mse_loss(x, x * 2, size_average=True), None),
    "a composed loss": (lambda x, y: 2 * functional.mse_loss(x, x * 2) + x.square().mean() / 3 + 1, None),
    "rows": (lambda x, y: x.square().sum((1, 2)).mean(), None),
    "margins": (lambda x, y: functional.multi_margin_loss(x[:, :, 0], y[:, 0]), None),
    "soft": (lambda x, y: soft_cross_entropy(x, y, ignore_index=0), [2, 1, 3, 1]),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("case", WEIGHED)
def test_weights_are_those_that_the_loss_divides_by(case):
    function, weights = WEIGHED[case]
    rule = rule_of(function)
    found = rule.weigh({"x": outputs(), "y": LABELS})
    assert (found if found is None else list(found)) == weights
    assert not rule.is_sum
    # The mean over the batch is that of its samples by these weights.
    x = outputs()
    parts = torch.stack([function(x[row : row + 1], LABELS[row : row + 1]) for row in range(4)])
    weighed = torch.tensor(weights or [1.0] * 4)
    torch.testing.assert_close((parts.nan_to_num() * weighed).sum() / weighed.sum(), function(x, LABELS))


def test_sums_are_told_from_means():
    assert rule_of(lambda x, y: 0.5 * functional.cross_entropy(x, y, reduction="sum")).is_sum
    assert rule_of(lambda x, y: functional.mse_loss(x, x * 2, reduction="sum") + x.sum()).is_sum
    assert not rule_of(lambda x, y: functional.mse_loss(x, x * 2, reduction="sum") / 4).is_sum


UNREAD = {
    "not computed by torch's loss functions": lambda x, y: functional.mse_loss(x, x * 2).sqrt(),
    "not computed by torch's loss functions or": lambda x, y: (x.square() * y.unsqueeze(1)).sum() / y.sum(),
    "`matmul` may combine samples": lambda x, y: (x[:, 0] @ x[:, 1].T).mean(),
    "`getitem` may combine samples": lambda x, y: x.mean(1)[y > 1].mean(),
    "`mean` may combine samples": lambda x, y: (x - x.mean(0)).square().mean(),
    "`sub` may combine samples": lambda x, y: (x[:, 0].unsqueeze(1) - x[:, 0]).square().mean(),
    "the labels of `cross_entropy` are no part of the batch": lambda x, y: functional.cross_entropy(x, 3 - y),
    "it adds sums to means": lambda x, y: functional.mse_loss(x, x * 2) + x.square().sum(),
    r"divided by different numbers \(`cross_entropy`, `mean`\)": lambda x, y: (
        functional.cross_entropy(x, y, ignore_index=0) + x.square().mean()
    ),
}


@pytest.mark.parametrize("reason", UNREAD)
def test_a_loss_without_a_known_denominator_has_a_reason(reason):
    rule = rule_of(UNREAD[reason])
    assert isinstance(rule, str)
    assert re.search(reason, rule)
