"""z-loss: the formula, its mask, and its effect on the training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hocket.algos import (
    AlgorithmConfigError,
    CutMix,
    IncompatibleError,
    LabelSmoothing,
    MixUp,
    ZLoss,
    z_loss,
)
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models.base import LossSum
from support.methods import train


def test_the_term_is_the_square_of_the_log_normalizer() -> None:
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    expected = 0.1 * logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(z_loss(logits, coefficient=0.1), expected.float())
    torch.testing.assert_close(z_loss(logits.movedim(-1, 1), coefficient=0.1, class_dim=1), expected.float())


def test_masked_positions_do_not_count_and_get_no_gradient() -> None:
    logits = torch.randn(2, 4, 6, requires_grad=True)
    mask = torch.tensor([[True, False, True, True], [False] * 4])
    term = z_loss(logits, mask)
    torch.testing.assert_close(term, z_loss(logits[0, [0, 2, 3]]))
    term.backward()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()
    assert z_loss(logits, torch.zeros(2, 4, dtype=torch.bool)) == 0


def _applied(algorithm: ZLoss, loss: Any, outputs: Any, batch: Any = None) -> Any:
    state: Any = SimpleNamespace(outputs=outputs, loss=loss, batch=batch)
    algorithm.apply(None, state, None)  # type: ignore[arg-type]
    return state.loss


def test_the_term_is_added_to_every_form_of_loss() -> None:
    logits = torch.randn(2, 4, 6)
    term, algorithm = z_loss(logits), ZLoss()
    torch.testing.assert_close(_applied(algorithm, torch.tensor(2.0), {"logits": logits}), 2 + term)
    summed = _applied(algorithm, LossSum(torch.tensor(8.0), 4.0), SimpleNamespace(logits=logits))
    torch.testing.assert_close(summed.total / summed.weight, 2 + term)
    parts = _applied(algorithm, {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}, logits)
    torch.testing.assert_close(parts["total"], 2 + term)
    with pytest.raises(IncompatibleError, match="loss of type str"):
        _applied(algorithm, "loss", logits)
    with pytest.raises(IncompatibleError, match="needs logits"):
        _applied(algorithm, torch.tensor(2.0), [logits])


def test_ignored_labels_mask_the_previous_position() -> None:
    logits, labels = torch.randn(1, 4, 6), torch.tensor([[5, 2, -100, 3]])
    loss = _applied(ZLoss(target_key="labels"), torch.tensor(0.0), logits, {"labels": labels})
    torch.testing.assert_close(loss, z_loss(logits[:, [0, 2]]))
    unshifted = ZLoss(target_key="labels", shift=False)
    loss = _applied(unshifted, torch.tensor(0.0), logits, {"labels": labels})
    torch.testing.assert_close(loss, z_loss(logits[:, [0, 1, 3]]))


def test_labels_are_shifted_only_where_the_classes_are_in_the_last_dim() -> None:
    logits, labels = torch.randn(1, 3, 4, 2), torch.full((1, 4, 2), -100)
    labels[:, 0] = 0
    loss = _applied(ZLoss(target_key=1, class_dim=1), torch.tensor(0.0), logits, (None, labels))
    torch.testing.assert_close(loss, z_loss(logits[:, :, :1], class_dim=1))
    shifted = ZLoss(target_key=1, class_dim=2)
    loss = _applied(
        shifted, torch.tensor(0.0), logits[..., 0].movedim(1, 2), (None, labels[..., 0].roll(1, 1))
    )
    torch.testing.assert_close(loss, z_loss(logits[:, :, 0, 0]))


@pytest.mark.parametrize("other", [LabelSmoothing(0.1), MixUp(), CutMix(), MixUp(interpolate_loss=True)])
def test_targets_are_read_after_other_methods_have_restored_them(other: Any) -> None:
    algorithm = ZLoss(0.1, target_key=1, class_dim=1)
    assert len(train([], kind="images", algorithms=[algorithm, other])[1]) == 4


def test_microbatches_weighted_by_labels_give_the_same_training() -> None:
    algorithm = ZLoss(0.1, target_key="labels")
    whole, losses = train([], kind="text", algorithms=[algorithm])
    split, others = train([], kind="text", algorithms=[algorithm], device_train_microbatch_size=3)
    assert others == pytest.approx(losses, rel=1e-5)
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, atol=1e-5, rtol=1e-4)


def test_logits_stay_closer_to_normalized() -> None:
    model, _ = train([], kind="text", algorithms=[ZLoss(1.0)])
    plain, _ = train([], kind="text")
    assert not torch.equal(model["head.bias"], plain["head.bias"])
    # The initial log Z is near log 32 > 0, and the term pushes all logits down.
    assert model["head.bias"].mean() < plain["head.bias"].mean()


def test_misuse_is_named() -> None:
    with pytest.raises(AlgorithmConfigError, match="`coefficient` is -1"):
        ZLoss(-1)
    with pytest.raises(IncompatibleError, match=r"`mask` has shape \(3,\), expected \(2,\)"):
        z_loss(torch.zeros(2, 4), torch.ones(3, dtype=torch.bool))
    with pytest.raises(TrainerConfigError, match="the term would be added twice"):
        train([], kind="text", algorithms=[ZLoss(), ZLoss()])
