"""CutMix: patches from partners, targets mixed by area, and target maps patched as images."""

from typing import Any

import pytest
import torch

from hocket.algos import AlgorithmConfigError, CutMix, IncompatibleError, MixUp, cutmix_batch
from hocket.trainer.errors import TrainerConfigError
from support.methods import train


def test_a_patch_comes_from_the_partner_and_its_area_is_the_mixing_share() -> None:
    images, target = torch.randn(4, 3, 8, 10), torch.arange(4)
    indices = torch.tensor([3, 2, 1, 0])
    mixed, partners, share, box = cutmix_batch(images, target, bbox=(1, 2, 5, 9), indices=indices)
    inside = torch.zeros(8, 10, dtype=torch.bool)
    inside[1:5, 2:9] = True
    assert torch.equal(mixed, torch.where(inside, images[indices], images))
    assert share == pytest.approx(1 - 28 / 80)
    assert box == (1, 2, 5, 9)
    assert torch.equal(partners, target[indices])


def test_length_is_the_side_of_the_patch() -> None:
    images = torch.randn(2, 1, 40, 60)
    for _ in range(50):
        *_, (top, left, bottom, right) = cutmix_batch(images, torch.arange(2), length=0.5)
        assert bottom - top <= 20
        assert right - left <= 30
    boxes = [cutmix_batch(images, torch.arange(2), length=0.5)[3] for _ in range(200)]
    assert any((box[2] - box[0], box[3] - box[1]) == (20, 30) for box in boxes)


@pytest.mark.parametrize("uniform", [False, True])
def test_uniform_sampling_covers_every_pixel_equally_often(uniform: bool) -> None:
    count = torch.zeros(12, 12)
    for _ in range(3000):
        *_, (top, left, bottom, right) = cutmix_batch(
            torch.zeros(1, 1, 12, 12), torch.zeros(1), length=0.5, uniform_sampling=uniform
        )
        count[top:bottom, left:right] += 1
    corner, middle = float(count[0, 0]), float(count[6, 6])
    assert (corner / middle > 0.7) == uniform


def test_the_mean_share_follows_the_beta_distribution() -> None:
    images = torch.zeros(2, 1, 64, 64)
    shares = [cutmix_batch(images, torch.arange(2), alpha=1.0)[2] for _ in range(500)]
    assert 0.5 < sum(shares) / 500 < 0.8  # 0.5, and more if the patch extends over the edge
    assert min(shares) >= 0
    assert max(shares) <= 1


def test_target_maps_get_the_same_patches_as_the_images() -> None:
    algorithm = CutMix()
    torch.manual_seed(0)
    images = torch.randn(4, 1, 8, 8)
    mixed = algorithm.mix_inputs(images)
    maps = images.squeeze(1)
    assert torch.equal(algorithm.mix_targets(maps, torch.zeros(4, 3, 8, 8)), mixed.squeeze(1))
    with pytest.raises(IncompatibleError, match="leave `interpolate_loss` at False"):
        CutMix(interpolate_loss=True).mix_losses(torch.tensor(0.0), torch.zeros(4, 1, 1, 1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_training_with_patches_moves_the_model(interpolate_loss: bool) -> None:
    plain, _ = train([], kind="images")
    mixed, losses = train([], kind="images", algorithms=[CutMix(1.0, interpolate_loss)])
    assert not torch.equal(plain["head.weight"], mixed["head.weight"])
    assert all(0 < loss < 10 for loss in losses)


def test_both_values_of_interpolate_loss_give_the_same_training() -> None:
    targets, _ = train([], kind="images", algorithms=[CutMix(1.0)])
    losses, _ = train([], kind="images", algorithms=[CutMix(1.0, interpolate_loss=True)])
    for name, value in targets.items():
        torch.testing.assert_close(losses[name], value, atol=1e-5, rtol=1e-5)


def test_two_methods_that_mix_samples_are_refused() -> None:
    with pytest.raises(TrainerConfigError, match=r"each mixes every sample with another one; choose one"):
        train([], kind="images", algorithms=[MixUp(), CutMix()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 1.5}, "`length` is 1.5; expected a number from 0 to 1"),
        ({"length": 0.5, "bbox": (0, 0, 1, 1)}, "`length` and `bbox` both state the patch"),
        ({"alpha": -0.1}, "`alpha` is -0.1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        cutmix_batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), **arguments)


def test_inputs_without_rows_are_named() -> None:
    with pytest.raises(IncompatibleError, match=r"images of shape \(B, C, H, W\) with at least 3 dims"):
        CutMix().mix_inputs(torch.zeros(3, 4))
