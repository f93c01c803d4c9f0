"""ColOut: dropping rows and columns of batches, samples and targets."""

from typing import Any

import numpy as np
import pytest
import torch

from hocket.algos import AlgorithmConfigError, ColOut, ColOutTransform, IncompatibleError, colout_batch
from support.methods import train


def test_the_kept_rows_and_columns_stay_in_order() -> None:
    image = torch.arange(20 * 10.0).view(1, 1, 20, 10)
    left = colout_batch(image, p_row=0.15, p_col=0.3)
    assert left.shape == (1, 1, 17, 7)
    rows, columns = left[0, 0, :, 0] // 10, left[0, 0, 0] % 10
    assert (rows.diff() > 0).all()
    assert (columns.diff() > 0).all()
    assert torch.equal(left[0, 0], image[0, 0][rows.long()][:, columns.long()])


def test_a_target_of_the_images_size_loses_the_same_rows_and_columns() -> None:
    image = torch.rand(2, 3, 12, 12)
    left, target = colout_batch((image, image[:, 0]), 0.5, 0.5)
    assert torch.equal(left[:, 0], target)
    assert isinstance(colout_batch((image, torch.zeros(2)), 0.5, 0.5), torch.Tensor)
    assert isinstance(colout_batch((image, 7), 0.5, 0.5), torch.Tensor)
    for number in (np.int64(7), np.float32(7), np.zeros((12, 12))):
        assert isinstance(colout_batch((image, number), 0.5, 0.5), torch.Tensor)
        with pytest.raises(IncompatibleError, match="needs a target with the images' height and width"):
            colout_batch((image, number), 0.5, 0.5, resize_target=True)
    assert isinstance(colout_batch((image, image[:, 0]), 0.5, 0.5, resize_target=False), torch.Tensor)


def test_pil_images_stay_pil_images() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    from PIL import Image

    image = Image.new("L", (20, 10))
    assert ColOutTransform(0.5, 0.25)(image).size == (15, 5)
    left, target = ColOutTransform(0.5, 0.25)((image.convert("RGB"), image))
    assert left.size == target.size == (15, 5)
    assert (left.mode, target.mode) == ("RGB", "L")


def test_a_model_sees_smaller_batches_or_smaller_samples() -> None:
    sizes: list[tuple[int, ...]] = []

    def keep(module: Any, args: Any) -> None:
        sizes.append(tuple(args[0][0].shape))

    from support.methods import make_model

    for batch in (True, False):
        model = make_model("images")
        model.register_forward_pre_hook(keep)
        train([], kind="images", steps=2, model=model, algorithms=[ColOut(0.25, 0.5, batch)])
    assert set(sizes) == {(8, 3, 12, 8)}
    assert len(sizes) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p_row": 1}, "`p_row` is 1, which drops everything"),
        ({"p_col": -0.5}, "`p_col` is -0.5; expected a number from 0 to 1"),
        ({"resize_target": "yes"}, "`resize_target` is 'yes'; expected one of `False`, `True`, `auto`"),
        ({"resize_target": True, "batch": False}, "`resize_target=True` needs `batch=True`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmConfigError, match=message):
        ColOut(**arguments)


def test_targets_that_cannot_be_resized_are_named() -> None:
    image = torch.rand(2, 3, 12, 12)
    for sample in ((image, torch.zeros(2)), image):
        with pytest.raises(IncompatibleError, match="`resize_target=True` needs a"):
            colout_batch(sample, resize_target=True)
    with pytest.raises(IncompatibleError, match="has 3 parts"):
        colout_batch((image, image, image))


def test_a_data_set_without_a_transform_is_refused_at_the_build() -> None:
    data = [(torch.rand(3, 8, 8), 0)] * 8
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(IncompatibleError, match="`list`, which has no attribute `transform`"):
        train([], kind="images", algorithms=[ColOut(batch=False)], train_dataloader=loader)
