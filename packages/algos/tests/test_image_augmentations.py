"""RandAugment and AugMix: types of images, random draws, mixtures, and their position in transforms."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from hocket.algos import (
    AlgorithmConfigError,
    AugmentAndMixTransform,
    AugMix,
    IncompatibleError,
    RandAugment,
    RandAugmentTransform,
    augmentations,
    augmix_image,
    randaugment_image,
)
from hocket.algos.augmentations import augmentation_sets
from support.methods import ImageData, train

pytest.importorskip("torchvision", reason="needs torchvision")
from PIL import Image
from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, ToTensor

PIXELS = torch.randint(0, 256, (3, 20, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PICTURE = Image.fromarray(PIXELS.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("function", [randaugment_image, augmix_image])
@pytest.mark.parametrize("name", sorted(augmentation_sets))
def test_images_keep_their_type_size_and_range(function: Any, name: str) -> None:
    for _ in range(10):
        picture = function(PICTURE, augmentation_set=name)
        assert (picture.size, picture.mode) == (PICTURE.size, "RGB")
        pixels = function(PIXELS, augmentation_set=name)
        assert (pixels.shape, pixels.dtype) == (PIXELS.shape, torch.uint8)
        floats = function(PIXELS / 255, augmentation_set=name)
        assert floats.dtype == torch.float32
        assert 0 <= floats.min() <= floats.max() <= 1 + 1e-6
    assert function(torch.stack([PIXELS] * 2)).shape == (2, 3, 20, 24)
    assert len(function([PICTURE, PICTURE])) == 2


@pytest.mark.parametrize("augmentation", augmentation_sets["all"] + augmentation_sets["original"][-4:])
def test_tensors_are_augmented_as_pil_images(augmentation: Any) -> None:
    for seed in range(3):
        random.seed(seed)
        picture = PILToTensor()(augmentation(PICTURE, 5))
        random.seed(seed)
        pixels = augmentation(PIXELS, 5)
        difference = (picture.float() - pixels.float()).abs()
        # torchvision interpolates tensors and PIL images slightly differently between pixels and at edges.
        assert difference.mean() < 12


def test_randaugment_applies_the_drawn_augmentations() -> None:
    random.seed(3)
    drawn = [random.choice([0, 1]) for _ in range(4)]
    random.seed(3)
    seen: list[tuple[int, float]] = []

    def first(image: Any, severity: float) -> Any:
        seen.append((0, severity))
        return image

    def second(image: Any, severity: float) -> Any:
        seen.append((1, severity))
        return image

    assert randaugment_image(PIXELS, severity=7, depth=4, augmentation_set=[first, second]) is PIXELS
    assert seen == [(number, 7) for number in drawn]


def test_augmix_is_a_convex_combination_of_chains() -> None:
    black = [lambda image, severity: image * 0]
    shares = []
    for seed in range(200):
        random.seed(seed)
        mixed = augmix_image(PIXELS / 255, alpha=1.0, augmentation_set=black)
        share = mixed.sum() / (PIXELS / 255).sum()
        torch.testing.assert_close(mixed, PIXELS / 255 * share)
        shares.append(float(share))
    # The remaining share of the image is 1 - Beta(1, 1), which is uniform.
    assert 0.42 < sum(shares) / 200 < 0.58
    assert min(shares) < 0.05 < 0.95 < max(shares)
    same = augmix_image(PIXELS / 255, augmentation_set=[lambda image, severity: image])
    torch.testing.assert_close(same, PIXELS / 255)


@pytest.mark.parametrize(
    ("own", "kinds"),
    [
        (None, ["T"]),
        (ToTensor(), ["T", "ToTensor"]),
        (RandomHorizontalFlip(), ["RandomHorizontalFlip", "T"]),
        (Compose([RandomHorizontalFlip(), ToTensor()]), ["RandomHorizontalFlip", "T", "ToTensor"]),
        (Compose([RandomHorizontalFlip()]), ["RandomHorizontalFlip", "T"]),
    ],
)
def test_the_transform_is_inserted_before_the_conversion_to_tensors(own: Any, kinds: list[str]) -> None:
    from hocket.algos.dataset_transforms import add_transform

    class T:
        pass

    data = ImageData(4)
    data.transform = own
    add_transform(data, T())  # type: ignore[arg-type]
    steps = getattr(data.transform, "transforms", [data.transform])
    assert [type(step).__name__ for step in steps] == kinds


def test_torchvisions_data_sets_get_the_transform() -> None:
    from torchvision.datasets import FakeData, VisionDataset

    from hocket.algos.dataset_transforms import add_transform

    for own in (None, ToTensor()):
        data: VisionDataset = FakeData(size=4, image_size=(3, 8, 8), transform=own)
        add_transform(data, lambda image: Image.new("RGB", (5, 5)))
        image, _ = data[0]
        assert (image.size if own is None else tuple(image.shape[1:])) == (5, 5)


@pytest.mark.parametrize("name", ["AugMix", "RandAugment"])
def test_a_data_set_gets_the_transform_once(name: str) -> None:
    _, losses = train([name])
    assert losses != train([], kind="images")[1]

    def count(trainer: Any) -> None:
        trainer.fit("1ba")
        steps = trainer.state.dataloader.dataset.transform.transforms
        assert len(steps) == 2

    train([name], look=count)


def _training_part(data: Any, how: str) -> tuple[Any, Any]:
    """Return a part of a data set to train on and one to evaluate on."""
    if how == "nested":
        data = Subset(data, range(32))
    return Subset(data, range(24)), Subset(data, range(24, 32))


@pytest.mark.parametrize("how", ["split", "nested"])
@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_subset_for_training_is_augmented(how: str, workers: int) -> None:
    data = ImageData(32, pil=True)
    training, evaluation = _training_part(data, how)
    methods = [RandAugment(), AugMix()]
    before = [evaluation[index][0] for index in range(8)]
    loader = DataLoader(training, batch_size=8, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of a fork in a process with threads
        train(
            [],
            kind="images",
            steps=2,
            train_dataloader=loader,
            algorithms=methods,
            look=lambda trainer: trainer.fit("1ba"),
        )
    inner = training.dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    names = [type(step).__name__ for step in inner.transform.transforms]
    assert names == ["AugmentAndMixTransform", "RandAugmentTransform", "ToTensor"]
    assert len(data.transform.transforms) == 1
    assert all(torch.equal(evaluation[index][0], before[index]) for index in range(8))


def test_a_torchvision_data_set_is_not_changed_through_its_copy() -> None:
    from torchvision.datasets import FakeData

    from hocket.algos.dataset_transforms import add_transform, own_dataset_of

    data = FakeData(size=4, image_size=(3, 8, 8), transform=ToTensor())
    first, second = Subset(data, [0, 1]), Subset(data, [2, 3])
    add_transform(own_dataset_of("RandAugment", DataLoader(first)), lambda image: Image.new("RGB", (5, 5)))
    assert first[0][0].shape == (3, 5, 5)
    assert second[0][0].shape == data[0][0].shape == (3, 8, 8)


def test_parts_that_are_joined_raise() -> None:
    joined = ConcatDataset([ImageData(8), ImageData(8)])
    with pytest.raises(IncompatibleError, match="reads a `ConcatDataset`, which has no attribute"):
        train([], kind="images", train_dataloader=DataLoader(joined, 8), algorithms=[RandAugment()])


def test_tensors_are_solarized_at_every_severity_as_pil_images() -> None:
    for seed in range(30):
        random.seed(seed)
        picture = PILToTensor()(augmentations.solarize(PICTURE, 0.0))
        for image, scale in ((PIXELS, 1), (PIXELS / 255, 255)):
            random.seed(seed)
            torch.testing.assert_close(augmentations.solarize(image, 0.0) * scale, picture.to(image.dtype))


@pytest.mark.parametrize("method", [RandAugment, RandAugmentTransform, AugMix, AugmentAndMixTransform])
def test_wrong_arguments_are_named(method: Any) -> None:
    with pytest.raises(AlgorithmConfigError, match="`severity` is 11; expected a number from 0 to 10"):
        method(severity=11)
    with pytest.raises(
        AlgorithmConfigError, match="`augmentation_set` is 'most', expected one of 'all', 'safe'"
    ):
        method(augmentation_set="most")
    with pytest.raises(AlgorithmConfigError, match=r"`augmentation_set` is \[\]"):
        method(augmentation_set=[])
    with pytest.raises(AlgorithmConfigError, match="`depth` is -2"):
        method(depth=-2)


def test_augmix_raises_for_invalid_arguments_of_its_own() -> None:
    for arguments, message in [
        ({"width": 0}, "`width` is 0"),
        ({"alpha": 0}, "`alpha` is 0"),
        ({"depth": 0}, "`depth` is 0"),
    ]:
        with pytest.raises(AlgorithmConfigError, match=message):
            AugMix(**arguments)  # type: ignore[arg-type]


def test_inputs_that_are_no_images_raise_with_their_type() -> None:
    with pytest.raises(IncompatibleError, match="takes PIL images or tensors"):
        randaugment_image("image")
