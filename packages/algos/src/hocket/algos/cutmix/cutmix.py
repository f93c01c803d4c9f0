"""CutMix: patches of other samples, with targets mixed by area."""

import math
import random
from typing import TYPE_CHECKING

import torch

from hocket.algos.batches import ItemKey
from hocket.algos.checks import as_tensor_item, check_choice, check_fraction, check_number
from hocket.algos.draws import draw_beta, draw_permutation
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.input_mixing import InputMixing, mix_probabilities
from hocket.algos.order import Order

if TYPE_CHECKING:
    from hocket.trainer.state import State

Box = tuple[int, int, int, int]
"""A patch: first row, first column, end row, end column; ends are exclusive."""


class CutMix(InputMixing):
    """Pastes a patch of another sample of the microbatch into each image, and mixes targets by area.

    Args:
        alpha: Parameter of the Beta distribution that the area left of an image is drawn from; at least 0.
        interpolate_loss: Interpolate the losses of both targets instead of the targets; for a loss that does
            not take probabilities. Costs a second loss.
        uniform_sampling: Draw the patch so that each pixel is equally likely to be in it; by default its
            center is within the image, which favors the middle.
        input_key: Key of the images in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).
        target_key: Key of the targets: classes, probabilities, or maps of the images' height and width.

    Raises:
        AlgorithmConfigError: `alpha` is below 0.

    Example:
        >>> CutMix(alpha=1.0)
        CutMix(alpha=1.0, interpolate_loss=False, uniform_sampling=False)

    Source: Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers, 2019, section 3.1.
    """

    order = Order.CUT_MIX

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: ItemKey = 0,
        target_key: ItemKey = 1,
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        check_choice("uniform_sampling", uniform_sampling, (False, True))
        self.uniform_sampling = uniform_sampling
        self._indices = torch.empty(0, dtype=torch.long)
        self._box: Box = (0, 0, 0, 0)
        self._size = (1, 1)

    def mix_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Paste into each image the drawn patch of a drawn partner."""
        as_tensor_item("CutMix", "images of shape (B, C, H, W)", inputs, least_dims=3)
        self._size = (inputs.shape[-2], inputs.shape[-1])
        area = 1.0 - draw_beta(self.alpha)
        self._box = _draw_box(self._size, math.sqrt(area), self.uniform_sampling)
        self._indices = draw_permutation(inputs.shape[0], inputs.device)
        return _paste(inputs, self._indices, self._box)

    def mix_targets(self, target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Paste target maps like the images; mix classes by the patch's area."""
        if self._is_map(target):
            return _paste(target, self._indices, self._box)
        return mix_probabilities(target, logits, self._indices, _area(self._box, self._size))

    def mix_losses(self, loss: torch.Tensor, target: torch.Tensor, state: "State") -> torch.Tensor:
        """Mix the losses of both targets by the patch's area."""
        if self._is_map(target):
            raise IncompatibleError(
                "`CutMix(interpolate_loss=True)` cannot mix the losses of targets with the images' height "
                "and width; leave `interpolate_loss` at False, which pastes the targets' patches"
            )
        share = _area(self._box, self._size)
        return (1 - share) * loss + share * self.loss_with(target[self._indices], state)

    def _is_map(self, target: torch.Tensor) -> bool:
        return target.ndim > 2 and tuple(target.shape[-2:]) == self._size

    def __repr__(self) -> str:
        return (
            f"CutMix(alpha={self.alpha!r}, interpolate_loss={self.interpolate_loss!r}, "
            f"uniform_sampling={self.uniform_sampling!r})"
        )


def cutmix_batch(
    input: torch.Tensor,  # noqa: A002 - Composer's name
    target: torch.Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: torch.Tensor | None = None,
    uniform_sampling: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, float, Box]:
    """Paste into each image a patch of another one, at the same place in all images.

    Needs no trainer. The loss to train with is `share * loss(target) + (1 - share) * loss(permuted target)`.

    Args:
        input: `(B, C, H, W)`.
        target: `(B, ...)`.
        length: Side of the patch as a share of the image's, 0 to 1; by default from the drawn area.
        alpha: At least 0; the area left of each image is drawn from Beta(alpha, alpha).
        bbox: The patch (first row, first column, end row, end column) instead of a drawn one.
        indices: `(B,)` long, the partner of each image; by default a drawn permutation.
        uniform_sampling: Same as for `CutMix`.

    Returns:
        The images, the permuted target, the share of each image that is its own, and the patch.

    Raises:
        AlgorithmConfigError: An argument is out of range, or both `length` and `bbox` are given.

    Source: Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers, 2019, section 3.1.
    """
    check_number("alpha", alpha, least=0)
    size = (input.shape[-2], input.shape[-1])
    if length is not None:
        check_fraction("length", length)
        if bbox is not None:
            raise AlgorithmConfigError("`length` and `bbox` both state the patch; give one of them")
    if bbox is None:
        side = length if length is not None else math.sqrt(1.0 - draw_beta(alpha))
        bbox = _draw_box(size, side, uniform_sampling)
    if indices is None:
        indices = draw_permutation(input.shape[0], input.device)
    return _paste(input, indices, bbox), target[indices], 1.0 - _area(bbox, size), bbox


def _paste(images: torch.Tensor, indices: torch.Tensor, box: Box) -> torch.Tensor:
    top, left, bottom, right = box
    pasted = images.clone()
    pasted[..., top:bottom, left:right] = images[..., top:bottom, left:right][indices]
    return pasted


def _area(box: Box, size: tuple[int, int]) -> float:
    top, left, bottom, right = box
    return (bottom - top) * (right - left) / (size[0] * size[1])


def _draw_box(size: tuple[int, int], side: float, uniform: bool) -> Box:
    spans = []
    for length in size:
        edge = int(length * side)
        half = edge // 2
        center = random.randrange(-half, length + half) if uniform and edge > 1 else random.randrange(length)
        spans.append((max(center - half, 0), min(center + half, length)))
    (top, bottom), (left, right) = spans
    return top, left, max(bottom, top), max(right, left)
