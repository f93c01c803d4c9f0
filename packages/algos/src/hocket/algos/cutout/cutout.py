"""CutOut: square holes in images."""

from typing import TYPE_CHECKING, ClassVar

import torch

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.checks import as_tensor_item, check_choice, check_count, check_fraction
from hocket.algos.images import Image, image_size, on_tensor
from hocket.algos.order import Order
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State


class CutOut(Algorithm):
    """Sets square holes of each image to zero, at places drawn for each image.

    Args:
        num_holes: Holes in each image.
        length: Side of a hole as a share of the image's shorter side, 0 to 1.
        uniform_sampling: Draw holes so that each pixel is equally likely to be in one; by default their
            centers are within the image, which favors the middle.
        input_key: Key of the images in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> CutOut(num_holes=1, length=0.5)
        CutOut(num_holes=1, length=0.5, uniform_sampling=False)

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_DATALOADER})
    order = Order.CUT_OUT

    def __init__(
        self,
        num_holes: int = 1,
        length: float = 0.5,
        uniform_sampling: bool = False,
        input_key: ItemKey = 0,
    ) -> None:
        _check(num_holes, length, uniform_sampling)
        self.num_holes = num_holes
        self.length = length
        self.uniform_sampling = uniform_sampling
        self.input_key = input_key

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Cut holes into the images of `state.batch`."""
        images = get_item(state.batch, self.input_key)
        as_tensor_item("CutOut", "images of shape (B, C, H, W)", images, least_dims=3)
        cut_images = cutout_batch(images, self.num_holes, self.length, self.uniform_sampling)
        state.batch = with_item(state.batch, self.input_key, cut_images)

    def __repr__(self) -> str:
        return (
            f"CutOut(num_holes={self.num_holes!r}, length={self.length!r}, "
            f"uniform_sampling={self.uniform_sampling!r})"
        )


def cutout_batch(
    input: Image,  # noqa: A002 - Composer's name
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
) -> Image:
    """Return images with square holes set to zero; needs no trainer.

    Args:
        input: A tensor `(B, C, H, W)`, in which each image gets its own holes, or `(C, H, W)`, or a PIL
            image.
        num_holes: Holes in each image.
        length: Side of a hole as a share of the image's shorter side, 0 to 1; odd sides lose a pixel.
        uniform_sampling: Same as for `CutOut`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: The input is no image.
        MissingExtraError: The image is a PIL image, and torchvision is not installed.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017,
    section 3.2.
    """
    _check(num_holes, length, uniform_sampling)
    size = image_size("cutout_batch", input)
    half = int(min(size) * length) // 2

    def cut(images: torch.Tensor) -> torch.Tensor:
        shape = (images.shape[0] if images.ndim > 3 else 1, num_holes)
        margin = half if uniform_sampling else 0
        rows, columns = (torch.randint(-margin, span + margin, shape, device=images.device) for span in size)
        return cut_holes(images, rows, columns, half)

    return on_tensor("cutout_batch", input, cut)


def cut_holes(images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, half: int) -> torch.Tensor:
    """Set the squares of `2 * half` pixels around given centers to zero.

    Args:
        images: `(B, C, H, W)` or `(C, H, W)`.
        rows: `(B, holes)` integer, the centers' rows; `(1, holes)` for one image.
        columns: The same for the columns.
        half: Half the side of a hole.
    """
    in_rows = _within(rows, half, images.shape[-2])
    in_columns = _within(columns, half, images.shape[-1])
    holes = (in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)).any(dim=1)  # (B, H, W)
    return images.masked_fill(holes.unsqueeze(1) if images.ndim > 3 else holes, 0)


def _within(centers: torch.Tensor, half: int, size: int) -> torch.Tensor:
    """Return whether each position lies within `half` of a center, `(B, holes, size)` bool."""
    position = torch.arange(size, device=centers.device)
    center = centers.unsqueeze(-1)
    return (position >= center - half) & (position < center + half)


def _check(num_holes: int, length: float, uniform_sampling: bool) -> None:
    check_count("num_holes", num_holes)
    check_fraction("length", length)
    check_choice("uniform_sampling", uniform_sampling, (False, True))
