"""CutOut: holes of the configured size, at different positions in each image."""

from typing import Any

import pytest
import torch

from hocket.algos import AlgorithmConfigError, CutOut, IncompatibleError, cutout_batch
from hocket.algos.cutout.cutout import cut_holes
from support.methods import train


def test_holes_are_squares_around_their_centers() -> None:
    images = torch.ones(2, 3, 8, 9)
    rows, columns = torch.tensor([[2, 7], [0, 4]]), torch.tensor([[3, 8], [0, 4]])
    expected = images.clone()
    for image in range(2):
        for row, column in zip(rows[image].tolist(), columns[image].tolist(), strict=True):
            expected[image, :, max(row - 2, 0) : row + 2, max(column - 2, 0) : column + 2] = 0
    assert torch.equal(cut_holes(images, rows, columns, 2), expected)


def test_each_image_has_its_own_hole() -> None:
    torch.manual_seed(0)
    cut = cutout_batch(torch.ones(64, 1, 16, 16), length=0.5)
    zeros = (cut == 0).flatten(1)
    assert zeros.sum(1).max() == 64
    assert zeros.sum(1).min() >= 16  # at least a quarter of the hole, at a corner
    assert len({tuple(row.tolist()) for row in zeros}) > 32


def test_uniform_sampling_covers_corners_as_often_as_the_middle() -> None:
    torch.manual_seed(0)
    share = [
        (cutout_batch(torch.ones(4000, 1, 8, 8), length=0.5, uniform_sampling=uniform) == 0)
        .float()
        .mean((0, 1))
        for uniform in (False, True)
    ]
    assert share[0][0, 0] < 0.7 * share[0][4, 4]
    assert share[1][0, 0] == pytest.approx(float(share[1][4, 4]), rel=0.15)


def test_single_images_and_pil_images_keep_their_type() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    from PIL import Image

    assert cutout_batch(torch.ones(3, 8, 8)).shape == (3, 8, 8)
    image = Image.new("RGB", (12, 8), "white")
    cut = cutout_batch(image, length=0.5)
    assert (cut.mode, cut.size) == ("RGB", (12, 8))
    assert cut.getextrema() == ((0, 255),) * 3


def test_the_loaders_batch_is_not_changed() -> None:
    batches: list[Any] = [(torch.ones(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))]
    train([], kind="images", steps=1, algorithms=[CutOut()], train_dataloader=batches)
    assert (batches[0][0] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_holes": 0}, "`num_holes` is 0; expected a whole number from 1 on"),
        ({"length": 2}, "`length` is 2; expected a number from 0 to 1"),
        ({"uniform_sampling": "yes"}, "`uniform_sampling` is 'yes'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    for make in (lambda: CutOut(**arguments), lambda: cutout_batch(torch.ones(1, 1, 4, 4), **arguments)):
        with pytest.raises(AlgorithmConfigError, match=message):
            make()


def test_inputs_that_are_no_images_raise_with_their_type() -> None:
    with pytest.raises(IncompatibleError, match="takes PIL images or tensors"):
        cutout_batch("image")  # type: ignore[type-var]
    with pytest.raises(IncompatibleError, match="needs one tensor as images"):
        train(
            [], kind="images", algorithms=[CutOut(input_key=(lambda batch: "x", lambda batch, value: batch))]
        )
