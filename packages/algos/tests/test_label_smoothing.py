"""Label smoothing: targets are the paper's mixture, and the user's batch is not changed."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hocket.algos import AlgorithmConfigError, IncompatibleError, LabelSmoothing, smooth_labels
from hocket.algos.batches import get_item, with_item
from hocket.trainer import Callback, ComposerClassifier, Trainer
from hocket.trainer.models import soft_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_the_loss_equals_torchs_label_smoothing(smoothing: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(4, 6, *shape), torch.randint(0, 6, (4, *shape))
    smoothed = smooth_labels(logits, target, smoothing=smoothing)
    assert smoothed.shape == logits.shape
    mine = torch.nn.functional.cross_entropy(logits, smoothed)
    torch.testing.assert_close(
        mine, torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing)
    )


def test_ignored_targets_add_nothing() -> None:
    logits, target = torch.randn(4, 3), torch.tensor([0, -100, 2, -1])
    losses = torch.nn.functional.cross_entropy(logits, smooth_labels(logits, target), reduction="none")
    assert losses[1] == losses[3] == 0
    expected = torch.nn.functional.cross_entropy(
        logits[::2], target[::2], label_smoothing=0.1, reduction="none"
    )
    torch.testing.assert_close(losses[::2], expected)


def test_probability_targets_are_smoothed() -> None:
    logits, target = torch.randn(2, 4), torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1.0]])
    expected = torch.tensor([[0.45, 0.45, 0.05, 0.05], [0.05, 0.05, 0.05, 0.85]])
    torch.testing.assert_close(smooth_labels(logits, target, smoothing=0.2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_smoothed_targets_are_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    logits, target = torch.randn(2, 4, dtype=dtype, requires_grad=True), torch.tensor([0, 1])
    smoothed = smooth_labels(logits.detach(), target)
    exact = smooth_labels(logits.detach().double(), target)
    assert smoothed.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(smoothed.double(), exact, rtol=1e-6, atol=1e-6)
    soft_cross_entropy(logits, smoothed).backward()
    expected = (logits.detach().double().softmax(1) - exact) / 2
    torch.testing.assert_close(logits.grad, expected.to(dtype), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("logits", "target"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.long)),
        (torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(4, 3, 2), torch.zeros(4, 3)),
    ],
)
def test_mismatched_shapes_raise_with_both_shapes(logits: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(IncompatibleError, match="expected"):
        smooth_labels(logits, target)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_smoothing_outside_zero_to_one_raises(smoothing: float) -> None:
    with pytest.raises(AlgorithmConfigError, match="expected 0 to 1"):
        LabelSmoothing(smoothing)
    with pytest.raises(AlgorithmConfigError, match="expected 0 to 1"):
        smooth_labels(torch.zeros(1, 2), torch.tensor([0]), smoothing=smoothing)


Named = namedtuple("Named", ["x", "y"])  # noqa: PYI024  # what torch's collate makes of one


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((1, 2), 1),
        ([1, 2], 1),
        ([1, 2], -1),
        ({"x": 1, "y": 2}, "y"),
        (Named(1, 2), 1),
        (SimpleNamespace(x=1, y=2), "y"),
        ({"x": 1, "y": 2}, (lambda batch: batch["y"], lambda batch, value: {**batch, "y": value})),
        ({"x": 1, "y": 2}, (lambda batch: batch["y"], lambda batch, value: batch.update(y=value))),
    ],
)
def test_an_item_is_replaced_in_a_copy(batch: Any, key: Any) -> None:
    assert get_item(batch, key) == 2
    changed = with_item(batch, key, 3)
    assert get_item(changed, key) == 3
    assert get_item(batch, key) == 2
    assert type(changed) is type(batch)


@pytest.mark.parametrize(("batch", "key"), [((1,), 1), ({"x": 1}, "y"), ({"x": 1}, 0), (7, 0)])
def test_a_missing_item_is_named(batch: Any, key: Any) -> None:
    with pytest.raises(IncompatibleError, match="has no item"):
        get_item(batch, key)


class Targets(Callback):
    """Records the targets during the loss, and those after it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def before_loss(self, state: Any, logger: Any) -> None:
        self.seen.append(state.batch[1])

    def after_loss(self, state: Any, logger: Any) -> None:
        self.seen.append(state.batch[1])


@pytest.mark.parametrize("size", [None, 2])
def test_the_original_targets_are_restored_after_the_loss(size: int | None) -> None:
    batch = (torch.randn(4, 5), torch.tensor([0, 2, 1, 1]))
    targets = Targets()
    model = ComposerClassifier(torch.nn.Linear(5, 3))
    with Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=[batch],
        algorithms=LabelSmoothing(0.1),
        callbacks=targets,
        device_train_microbatch_size=size,
        max_duration="1ba",
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert torch.equal(trainer.state.batch[1], torch.tensor([0, 2, 1, 1]))
    assert all(one.is_floating_point() for one in targets.seen[::2])
    assert torch.equal(torch.cat(targets.seen[1::2]), batch[1])
