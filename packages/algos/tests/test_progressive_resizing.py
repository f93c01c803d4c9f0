"""Progressive resizing: the schedule of sizes, and the resizing of images and targets."""

from typing import Any

import pytest
import torch

from hocket.algos import AlgorithmConfigError, IncompatibleError, ProgressiveResizing, resize_batch
from support.methods import make_model, train


def test_the_scale_is_constant_then_grows_then_stays_at_1() -> None:
    algorithm = ProgressiveResizing(initial_scale=0.5, delay_fraction=0.2, finetune_fraction=0.4)
    scales = {elapsed: algorithm.scale_at(elapsed) for elapsed in (0.0, 0.2, 0.4, 0.6, 0.9, 1.0)}
    assert scales == pytest.approx({0.0: 0.5, 0.2: 0.5, 0.4: 0.75, 0.6: 1.0, 0.9: 1.0, 1.0: 1.0})
    jump = ProgressiveResizing(delay_fraction=0.5, finetune_fraction=0.5)
    assert [jump.scale_at(elapsed) for elapsed in (0.0, 0.49, 0.5)] == [0.5, 0.5, 1.0]


def test_a_model_gets_images_that_grow_in_steps() -> None:
    widths: list[int] = []
    model = make_model("images")
    model.register_forward_pre_hook(lambda module, args: widths.append(args[0][0].shape[-1]))
    train(
        [],
        kind="images",
        steps=10,
        model=model,
        algorithms=[ProgressiveResizing(delay_fraction=0.3, finetune_fraction=0.2)],
    )
    assert widths[:4] == [8] * 4
    assert widths[-2:] == [16, 16]
    assert sorted(widths) == widths
    assert set(widths) == {8, 12, 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.long])
def test_resizing_uses_the_nearest_pixels(dtype: torch.dtype) -> None:
    image = torch.arange(64).view(1, 1, 8, 8).to(dtype)
    resized, target = resize_batch(image, image[:, 0].long(), 0.5, resize_targets=True)
    assert torch.equal(resized, image[..., ::2, ::2])
    assert torch.equal(target, image[:, 0, ::2, ::2].long())
    same, untouched = resize_batch(image, image, 1.0)
    assert same is image
    assert untouched is image


def test_cropping_uses_the_same_window_for_images_and_targets() -> None:
    torch.manual_seed(1)
    image = torch.arange(2 * 100).view(2, 1, 10, 10).float()
    for _ in range(10):
        cropped, target = resize_batch(image, image[:, 0], 0.6, mode="crop", resize_targets=True)
        assert cropped.shape == (2, 1, 6, 6)
        assert torch.equal(cropped[:, 0], target)
        assert torch.equal(cropped[1] - cropped[0], torch.full((1, 6, 6), 100.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "pad"}, "`mode` is 'pad'; expected one of `resize`, `crop`"),
        ({"initial_scale": 0}, "`initial_scale` is 0, expected a number above 0"),
        ({"initial_scale": 1.5}, "`initial_scale` is 1.5; expected a number from 0 to 1"),
        ({"delay_fraction": 0.9}, "`delay_fraction` \\+ `finetune_fraction` is 1.1"),
        ({"size_increment": 0}, "`size_increment` is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        ProgressiveResizing(**arguments)


def test_targets_without_height_are_named() -> None:
    with pytest.raises(IncompatibleError, match=r"needs targets with height and width.*shape \(2,\)"):
        resize_batch(torch.zeros(2, 1, 8, 8), torch.zeros(2), 0.5, resize_targets=True)
    with pytest.raises(IncompatibleError, match="with at least 4 dims"):
        resize_batch(torch.zeros(2, 8, 8), torch.zeros(2), 0.5)
