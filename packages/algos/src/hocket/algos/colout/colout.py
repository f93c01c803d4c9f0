"""ColOut: random rows and columns of images are dropped."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.checks import as_tensor_item, check_choice, check_fraction
from hocket.algos.dataset_transforms import DatasetTransform
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.images import image_size, is_pil, on_tensor
from hocket.algos.order import Order
from hocket.trainer.checks import Described
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

ResizeTarget = bool | Literal["auto"]


class ColOut(DatasetTransform):
    """Drops a fraction of the rows and columns of images, which makes them smaller and training faster.

    Args:
        p_row: Fraction of rows to drop, 0 to below 1.
        p_col: Fraction of columns to drop.
        batch: Drop the same rows and columns of all images of a batch, on the device. With False, a transform
            in the data set draws them for each image, which is slower and varies more.
        resize_target: Drop them from the targets, too; `"auto"` if a target has the image's height and
            width. With `batch=False`, targets cannot be changed.
        input_key: Key of the images in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).
        target_key: Key of the targets.

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> ColOut(p_row=0.15, p_col=0.15)
        ColOut(p_row=0.15, p_col=0.15, batch=True, resize_target='auto')
    """

    events: ClassVar[frozenset[Event] | None] = frozenset(
        {Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_DATALOADER}
    )
    order = Order.COL_OUT

    def __init__(
        self,
        p_row: float = 0.15,
        p_col: float = 0.15,
        batch: bool = True,
        resize_target: ResizeTarget = "auto",
        input_key: ItemKey = 0,
        target_key: ItemKey = 1,
    ) -> None:
        super().__init__()
        _check(p_row, p_col, resize_target)
        check_choice("batch", batch, (False, True))
        if resize_target is True and not batch:
            raise AlgorithmConfigError(
                "`resize_target=True` needs `batch=True`, because a transform of the data set sees no target"
            )
        self.p_row = p_row
        self.p_col = p_col
        self.batch = batch
        self.resize_target: ResizeTarget = resize_target
        self.input_key = input_key
        self.target_key = target_key

    def make_transform(self) -> Callable[[Any], Any]:
        """Return the transform of one image, for `batch=False`."""
        return ColOutTransform(self.p_row, self.p_col, resize_target=False)

    def match(self, event: Event, state: "State") -> bool:
        """Return whether a batch has been loaded or, with `batch=False`, the data set lacks the transform."""
        if self.batch:
            return event == Event.AFTER_DATALOADER
        return super().match(event, state)

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Drop rows and columns of `state.batch`, or add the transform to the data set."""
        if not self.batch:
            super().apply(event, state, logger)
            return
        images = get_item(state.batch, self.input_key)
        as_tensor_item("ColOut", "images of shape (B, C, H, W)", images, least_dims=3)
        if self.resize_target is False:
            changed = colout_batch(images, self.p_row, self.p_col, False)
        else:
            target = get_item(state.batch, self.target_key)
            changed = colout_batch((images, target), self.p_row, self.p_col, self.resize_target)
        if isinstance(changed, tuple):
            changed, target = changed
            state.batch = with_item(state.batch, self.target_key, target)
        state.batch = with_item(state.batch, self.input_key, changed)

    def __repr__(self) -> str:
        return (
            f"ColOut(p_row={self.p_row!r}, p_col={self.p_col!r}, batch={self.batch!r}, "
            f"resize_target={self.resize_target!r})"
        )


class ColOutTransform(Described):
    """A transform of one image, or of a pair (image, target), that drops random rows and columns.

    Args:
        p_row: Fraction of rows to drop, 0 to below 1.
        p_col: Fraction of columns to drop.
        resize_target: Same as for `colout_batch`.

    Raises:
        AlgorithmConfigError: An argument is out of range.
    """

    def __init__(
        self, p_row: float = 0.15, p_col: float = 0.15, resize_target: ResizeTarget = "auto"
    ) -> None:
        _check(p_row, p_col, resize_target)
        self.p_row = p_row
        self.p_col = p_col
        self.resize_target: ResizeTarget = resize_target

    def __call__(self, sample: Any) -> Any:
        """Return the sample without the drawn rows and columns."""
        return colout_batch(sample, self.p_row, self.p_col, self.resize_target)


def colout_batch(
    sample: Any, p_row: float = 0.15, p_col: float = 0.15, resize_target: ResizeTarget = "auto"
) -> Any:
    """Drop random rows and columns; needs no trainer.

    Args:
        sample: Images, or a pair (images, target): tensors `(..., H, W)`, or PIL images.
        p_row: Fraction of rows to drop, 0 to below 1.
        p_col: Fraction of columns to drop.
        resize_target: Drop them from the target, too. `"auto"` does so if the target is a PIL image or a
            tensor with more than 2 dims, with the images' height and width.

    Returns:
        The images; with a resized target, the pair of both.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: The sample is no image and no such pair.
        MissingExtraError: The image is a PIL image, and torchvision is not installed.
    """
    _check(p_row, p_col, resize_target)
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) not in (1, 2):
        raise IncompatibleError(f"`sample` has {len(parts)} parts, expected images or (images, target)")
    height, width = image_size("colout_batch", parts[0])
    device = parts[0].device if isinstance(parts[0], torch.Tensor) else torch.device("cpu")
    rows = _kept(height, p_row, device)
    columns = _kept(width, p_col, device)

    def drop(image: torch.Tensor) -> torch.Tensor:
        return image.index_select(-2, rows).index_select(-1, columns)

    images = on_tensor("colout_batch", parts[0], drop)
    if not _should_resize(parts, resize_target, (height, width)):
        return images
    return images, on_tensor("colout_batch", parts[1], drop)


def _kept(size: int, dropped: float, device: torch.device) -> torch.Tensor:
    indices: torch.Tensor = torch.randperm(size, device=device)[: max(int((1 - dropped) * size), 1)]
    return indices.sort().values


def _should_resize(parts: tuple[Any, ...], resize_target: ResizeTarget, size: tuple[int, int]) -> bool:
    if resize_target is False or len(parts) == 1:
        if resize_target is True:
            raise IncompatibleError("`resize_target=True` needs a pair (images, target)")
        return False
    target = parts[1]
    is_image = is_pil(target) or (isinstance(target, torch.Tensor) and target.ndim > 2)
    fits = is_image and image_size("colout_batch", target) == size
    if resize_target is True and not fits:
        raise IncompatibleError(
            f"`resize_target=True` needs a target with the images' height and width {size}; leave it at "
            "'auto' for targets without"
        )
    return fits


def _check(p_row: float, p_col: float, resize_target: ResizeTarget) -> None:
    for name, value in (("p_row", p_row), ("p_col", p_col)):
        check_fraction(name, value)
        if value == 1:
            raise AlgorithmConfigError(f"`{name}` is 1, which drops everything; expected a number below 1")
    check_choice("resize_target", resize_target, (False, True, "auto"))
