"""RandAugment: a few random augmentations of each image."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from hocket.algos.augmentations import Augmentation, find_augmentations, map_images
from hocket.algos.checks import check_count, check_number
from hocket.algos.dataset_transforms import DatasetTransform
from hocket.algos.images import vision
from hocket.algos.order import Order
from hocket.trainer.checks import Described


class RandAugment(DatasetTransform):
    """Adds to the training data set a transform that applies random augmentations to each image.

    Args:
        severity: Strength, 0 to 10.
        depth: Augmentations of each image, at least 0.
        augmentation_set: `"all"`, `"safe"`, `"original"`, or functions (image, severity) -> image.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingExtraError: torchvision is not installed.

    Example:
        >>> RandAugment(severity=9, depth=2)
        RandAugment(severity=9, depth=2, augmentation_set='all')

    Source: Cubuk et al., RandAugment: Practical automated data augmentation, 2020.
    """

    order = Order.RAND_AUGMENT

    def __init__(
        self,
        severity: float = 9,
        depth: int = 2,
        augmentation_set: str | Sequence[Augmentation] = "all",
    ) -> None:
        super().__init__()
        self._transform = RandAugmentTransform(severity, depth, augmentation_set)
        self.severity = severity
        self.depth = depth
        self.augmentation_set = augmentation_set

    def make_transform(self) -> Callable[[Any], Any]:
        """Return the transform of one image."""
        return self._transform

    def __repr__(self) -> str:
        return (
            f"RandAugment(severity={self.severity!r}, depth={self.depth!r}, "
            f"augmentation_set={self.augmentation_set!r})"
        )


class RandAugmentTransform(Described):
    """A transform that applies random augmentations to an image, PIL or a tensor.

    Args:
        severity: Strength, 0 to 10.
        depth: Augmentations of each image, at least 0.
        augmentation_set: Same as for `RandAugment`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingExtraError: torchvision is not installed.
    """

    def __init__(
        self,
        severity: float = 9,
        depth: int = 2,
        augmentation_set: str | Sequence[Augmentation] = "all",
    ) -> None:
        check_number("severity", severity, least=0, most=10)
        check_count("depth", depth, least=0)
        find_augmentations(augmentation_set)
        vision("RandAugment")
        self.severity = severity
        self.depth = depth
        self.augmentation_set = augmentation_set

    def __call__(self, image: Any) -> Any:
        """Return the augmented image."""
        return randaugment_image(image, self.severity, self.depth, self.augmentation_set)


def randaugment_image(
    img: Any,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: str | Sequence[Augmentation] = "all",
) -> Any:
    """Apply `depth` random augmentations, one after another; needs no trainer.

    Args:
        img: A PIL image, a tensor `(C, H, W)` (uint8, or float within 0 to 1), or several as a list or
            `(B, C, H, W)`, each with draws of its own.
        severity: Strength, 0 to 10.
        depth: Augmentations, drawn with replacement.
        augmentation_set: Same as for `RandAugment`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: `img` is no image.
        MissingExtraError: torchvision is not installed.

    Source: Cubuk et al., RandAugment: Practical automated data augmentation, 2020, section 3.
    """
    check_number("severity", severity, least=0, most=10)
    check_count("depth", depth, least=0)
    augmentations = find_augmentations(augmentation_set)

    def augment(image: Any) -> Any:
        for _ in range(depth):
            image = random.choice(augmentations)(image, severity)
        return image

    return map_images(augment, img)
