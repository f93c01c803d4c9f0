"""AugMix: a mixture of chains of augmentations of each image."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from hocket.algos.augmentations import Augmentation, as_floats, find_augmentations, like, map_images
from hocket.algos.checks import check_count, check_number
from hocket.algos.dataset_transforms import DatasetTransform
from hocket.algos.draws import draw_beta, draw_dirichlet
from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.images import vision
from hocket.algos.order import Order
from hocket.trainer.checks import Described


class AugMix(DatasetTransform):
    """Adds to the training data set a transform that mixes chains of augmentations of each image.

    Args:
        severity: Strength, 0 to 10.
        depth: Augmentations in a chain; -1 draws 1 to 3 for each chain.
        width: Chains, at least 1.
        alpha: Parameter of the Beta and Dirichlet distributions that mixing weights are drawn from, above 0.
        augmentation_set: `"all"`, `"safe"`, `"original"`, or functions (image, severity) -> image.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingExtraError: torchvision is not installed.

    Example:
        >>> AugMix(severity=3)
        AugMix(severity=3, depth=-1, width=3, alpha=1.0, augmentation_set='all')

    Source: Hendrycks et al., AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty,
    2020.
    """

    order = Order.AUG_MIX

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: str | Sequence[Augmentation] = "all",
    ) -> None:
        super().__init__()
        self._transform = AugmentAndMixTransform(severity, depth, width, alpha, augmentation_set)
        self.severity = severity
        self.depth = depth
        self.width = width
        self.alpha = alpha
        self.augmentation_set = augmentation_set

    def make_transform(self) -> Callable[[Any], Any]:
        """Return the transform of one image."""
        return self._transform

    def __repr__(self) -> str:
        return (
            f"AugMix(severity={self.severity!r}, depth={self.depth!r}, width={self.width!r}, "
            f"alpha={self.alpha!r}, augmentation_set={self.augmentation_set!r})"
        )


class AugmentAndMixTransform(Described):
    """A transform that mixes chains of augmentations of an image, PIL or a tensor.

    Args:
        severity: Same as for `AugMix`.
        depth: Same as for `AugMix`.
        width: Same as for `AugMix`.
        alpha: Same as for `AugMix`.
        augmentation_set: Same as for `AugMix`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        MissingExtraError: torchvision is not installed.
    """

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: str | Sequence[Augmentation] = "all",
    ) -> None:
        _check(severity, depth, width, alpha)
        find_augmentations(augmentation_set)
        vision("AugMix")
        self.severity = severity
        self.depth = depth
        self.width = width
        self.alpha = alpha
        self.augmentation_set = augmentation_set

    def __call__(self, image: Any) -> Any:
        """Return the mixed image."""
        return augmix_image(image, self.severity, self.depth, self.width, self.alpha, self.augmentation_set)


def augmix_image(
    img: Any,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: str | Sequence[Augmentation] = "all",
) -> Any:
    """Mix an image with chains of augmentations of it; needs no trainer.

    The result is `(1 - m) * img + m * Σ w_i * chain_i(img)`, with m from Beta(alpha, alpha) and the weights w
    from a symmetric Dirichlet distribution with parameter alpha.

    Args:
        img: A PIL image, a tensor `(C, H, W)` (uint8, or float within 0 to 1), or several as a list or
            `(B, C, H, W)`, each with draws of its own.
        severity: Strength, 0 to 10.
        depth: Augmentations in a chain; -1 draws 1 to 3 for each chain.
        width: Chains, at least 1.
        alpha: Above 0.
        augmentation_set: Same as for `AugMix`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: `img` is no image.
        MissingExtraError: torchvision is not installed.

    Source: Hendrycks et al., AugMix, 2020, algorithm 1.
    """
    _check(severity, depth, width, alpha)
    augmentations = find_augmentations(augmentation_set)

    def augment_and_mix(image: Any) -> Any:
        weights, mixing = draw_dirichlet(alpha, width), draw_beta(alpha)
        mixed = as_floats(image) * (1.0 - mixing)
        for weight in weights:
            chain = image
            for _ in range(depth if depth > 0 else random.randint(1, 3)):
                chain = random.choice(augmentations)(chain, severity)
            mixed += as_floats(chain) * (mixing * weight)
        return like(image, mixed)

    return map_images(augment_and_mix, img)


def _check(severity: float, depth: int, width: int, alpha: float) -> None:
    check_number("severity", severity, least=0, most=10)
    check_count("depth", depth, least=-1)
    check_count("width", width)
    check_number("alpha", alpha, least=0)
    if alpha == 0 or depth == 0:
        name, value = ("alpha", alpha) if alpha == 0 else ("depth", depth)
        raise AlgorithmConfigError(f"`{name}` is {value!r}, expected a number above 0 (or `depth=-1`)")
