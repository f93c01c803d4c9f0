"""MixUp: the paper's combination of inputs, targets and losses."""

from typing import Any

import pytest
import torch
from torch import nn

from hocket.algos import AlgorithmConfigError, IncompatibleError, LabelSmoothing, MixUp, mixup_batch
from hocket.trainer import Trainer
from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from support.methods import make_loader, make_model, train


def test_samples_are_combined_with_their_partners() -> None:
    inputs, target = torch.randn(5, 3), torch.arange(5)
    indices = torch.tensor([1, 0, 4, 2, 3])
    mixed, partners, mixing = mixup_batch(inputs, target, mixing=0.3, indices=indices)
    for row in range(5):
        torch.testing.assert_close(mixed[row], 0.7 * inputs[row] + 0.3 * inputs[indices[row]])
    assert torch.equal(partners, target[indices])
    assert mixing == 0.3


def test_the_coefficient_has_a_folded_beta_distribution_and_alpha_0_mixes_nothing() -> None:
    draws = [mixup_batch(torch.zeros(1), torch.zeros(1), alpha=0.4)[2] for _ in range(2000)]
    assert max(draws) <= 0.5
    # E[min(x, 1 - x)] of Beta(a, a), by integration.
    grid = torch.linspace(1e-5, 1 - 1e-5, 200_001, dtype=torch.float64)
    density = (grid * (1 - grid)).pow(0.4 - 1)
    expected = float((torch.minimum(grid, 1 - grid) * density).sum() / density.sum())
    assert sum(draws) / 2000 == pytest.approx(expected, abs=0.02)
    assert {mixup_batch(torch.zeros(1), torch.zeros(1), alpha=0)[2] for _ in range(20)} == {0.0}


class Seen(Callback):
    """Keeps the batch as the loss and as a metric get it."""

    def __init__(self) -> None:
        self.at_loss: list[Any] = []
        self.after: list[Any] = []

    def before_loss(self, state: Any, logger: Any) -> None:
        self.at_loss.append((state.batch[0].clone(), state.batch[1].clone(), state.outputs.detach()))

    def after_loss(self, state: Any, logger: Any) -> None:
        self.after.append((state.batch[1].clone(), float(state.loss.detach())))


def _seen(**options: Any) -> tuple[Seen, list[Any]]:
    seen = Seen()
    loader = make_loader("images", 2, shuffle=False)
    with Trainer(
        model=make_model("images"),
        train_dataloader=loader,
        algorithms=[MixUp(0.8, **options)],
        callbacks=[seen],
        max_duration="2ba",
        device="cpu",
        progress_bar=False,
        seed=3,
    ) as trainer:
        trainer.fit()
    return seen, list(loader)


def test_targets_are_mixed_like_the_inputs_and_restored_for_metrics() -> None:
    seen, batches = _seen()
    assert len(seen.at_loss) == 2
    for (mixed, targets, outputs), (labels, loss), (images, original) in zip(
        seen.at_loss, seen.after, batches, strict=True
    ):
        assert torch.equal(labels, original)
        own = nn.functional.one_hot(original, 4).float()
        # Solve for the coefficient and the partners from the targets, then check the images with them.
        mixing = 1 - float((targets * own).sum(1).min())
        assert 0 < mixing <= 0.5
        partner_share = targets - (1 - mixing) * own
        for row in range(len(images)):
            fits = [
                torch.allclose(mixed[row], torch.lerp(images[row], images[other], mixing), atol=1e-5)
                and torch.allclose(partner_share[row], mixing * own[other], atol=1e-5)
                for other in range(len(images))
            ]
            assert any(fits)
        assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), abs=1e-6)


def test_interpolated_losses_equal_the_loss_of_mixed_targets() -> None:
    # Cross entropy is linear in the target, so both ways must agree.
    mixed, _ = _seen()
    interpolated, _ = _seen(interpolate_loss=True)
    for (_, _, outputs), (_, loss), (_, targets, other) in zip(
        interpolated.at_loss, interpolated.after, mixed.at_loss, strict=True
    ):
        torch.testing.assert_close(outputs, other)
        assert loss == pytest.approx(float(nn.functional.cross_entropy(other, targets)), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -1}, "`alpha` is -1; expected a number from 0 on"),
        ({"alpha": float("nan")}, "`alpha` is nan"),
        ({"interpolate_loss": 1}, "`interpolate_loss` is 1; expected one of `False`, `True`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        MixUp(**arguments)


def test_a_mixing_coefficient_out_of_range_raises() -> None:
    with pytest.raises(AlgorithmConfigError, match=r"`mixing` is 1.5; expected a number from 0 to 1"):
        mixup_batch(torch.zeros(2), torch.zeros(2), mixing=1.5)


def test_an_unsuitable_batch_raises() -> None:
    with pytest.raises(
        IncompatibleError, match=r"`MixUp` needs floating point inputs, but they are torch.int64"
    ):
        train([], kind="text", algorithms=[MixUp(input_key="input_ids", target_key="labels")])
    with pytest.raises(IncompatibleError, match=r"has no item 'x'"):
        train([], kind="text", algorithms=[MixUp(input_key="x")])


def test_label_smoothing_with_interpolated_losses_raises_when_the_trainer_is_built() -> None:
    with pytest.raises(
        TrainerConfigError, match=r"`MixUp` and `LabelSmoothing` cannot be used together.*False"
    ):
        train([], kind="images", algorithms=[LabelSmoothing(), MixUp(interpolate_loss=True)])
