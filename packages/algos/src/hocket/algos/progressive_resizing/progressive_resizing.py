"""Progressive resizing: small images first, full size in the end."""

from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import nn

from hocket.algos.batches import ItemKey, get_item, with_item
from hocket.algos.checks import as_tensor_item, check_choice, check_count, check_fraction, check_number
from hocket.algos.errors import AlgorithmConfigError, IncompatibleError
from hocket.algos.order import Order
from hocket.algos.progress import elapsed_fraction
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.event import Event

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.state import State

Mode = Literal["resize", "crop"]


class ProgressiveResizing(Algorithm):
    """Trains on small images first, then on images that grow linearly, and last on full-size ones.

    Args:
        mode: `"resize"` scales the images, `"crop"` cuts a window at a random place, the same for a batch.
        initial_scale: Scale of the first images' sides, above 0, to 1.
        finetune_fraction: Share of the training at the end that has full-size images.
        delay_fraction: Share of the training at the start that has the initial scale.
        size_increment: Widths are rounded to multiples of it.
        resize_targets: Resize the targets, too (segmentation).
        input_key: Key of the images in the batch: an index, a key, an attribute's name, or a pair of
            functions (getter, setter).
        target_key: Key of the targets.

    Raises:
        AlgorithmConfigError: An argument is out of range, or the two fractions exceed 1.

    Example:
        >>> ProgressiveResizing(initial_scale=0.5)
        ProgressiveResizing(mode='resize', initial_scale=0.5, finetune_fraction=0.2, delay_fraction=0.5)

    Source: Howard, fast.ai's entry to DAWNBench, 2018; Touvron et al., Fixing the train-test resolution
    discrepancy, 2019.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.AFTER_DATALOADER})
    order = Order.PROGRESSIVE_RESIZING

    def __init__(
        self,
        mode: Mode = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: ItemKey = 0,
        target_key: ItemKey = 1,
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        _check_scale("initial_scale", initial_scale)
        check_number("initial_scale", initial_scale, least=0, most=1)
        check_fraction("finetune_fraction", finetune_fraction)
        check_fraction("delay_fraction", delay_fraction)
        if delay_fraction + finetune_fraction > 1:
            raise AlgorithmConfigError(
                f"`delay_fraction` + `finetune_fraction` is {delay_fraction + finetune_fraction!r}, expected "
                "at most 1"
            )
        check_count("size_increment", size_increment)
        check_choice("resize_targets", resize_targets, (False, True))
        self.mode: Mode = mode
        self.initial_scale = initial_scale
        self.finetune_fraction = finetune_fraction
        self.delay_fraction = delay_fraction
        self.size_increment = size_increment
        self.resize_targets = resize_targets
        self.input_key = input_key
        self.target_key = target_key

    def scale_at(self, elapsed: float) -> float:
        """Return the scale of the images' sides after a share of the training, 0 to 1."""
        if elapsed >= 1 - self.finetune_fraction:
            return 1.0
        growth = 1 - self.finetune_fraction - self.delay_fraction
        grown = max(elapsed - self.delay_fraction, 0.0) / growth if growth > 0 else 0.0
        return self.initial_scale + (1 - self.initial_scale) * grown

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Resize `state.batch`, and log the size."""
        images = as_tensor_item(
            "ProgressiveResizing",
            "images of shape (B, C, H, W)",
            get_item(state.batch, self.input_key),
            least_dims=4,
        )
        scale, width = self.scale_at(elapsed_fraction(state)), images.shape[-1]
        rounded = max(round(width * scale / self.size_increment), 1) * self.size_increment
        if rounded < width:
            target = get_item(state.batch, self.target_key) if self.resize_targets else None
            images, target = _resize(images, target, rounded / width, self.mode)
            state.batch = with_item(state.batch, self.input_key, images)
            if self.resize_targets:
                state.batch = with_item(state.batch, self.target_key, target)
        logger.log_metrics(
            {
                "progressive_resizing/height": images.shape[-2],
                "progressive_resizing/width": images.shape[-1],
                "progressive_resizing/scale_factor": scale,
            }
        )

    def __repr__(self) -> str:
        return (
            f"ProgressiveResizing(mode={self.mode!r}, initial_scale={self.initial_scale!r}, "
            f"finetune_fraction={self.finetune_fraction!r}, delay_fraction={self.delay_fraction!r})"
        )


def resize_batch(
    input: torch.Tensor,  # noqa: A002 - Composer's name
    target: torch.Tensor,
    scale_factor: float,
    mode: Mode = "resize",
    resize_targets: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize or crop images, and their targets on request; needs no trainer.

    Args:
        input: `(B, C, H, W)`.
        target: Any tensor; with `resize_targets`, `(B, H, W)` classes or `(B, K, H, W)`.
        scale_factor: Scale of the sides, above 0; from 1 on, nothing is changed.
        mode: `"resize"` takes the nearest pixels, `"crop"` cuts one window, drawn for the batch.
        resize_targets: Whether targets are resized like the images.

    Raises:
        AlgorithmConfigError: An argument is out of range.
        IncompatibleError: A tensor to resize has too few dims.
    """
    check_choice("mode", mode, get_args(Mode))
    _check_scale("scale_factor", scale_factor)
    as_tensor_item("resize_batch", "images of shape (B, C, H, W)", input, least_dims=4)
    if scale_factor >= 1:
        return input, target
    images, resized = _resize(input, target if resize_targets else None, scale_factor, mode)
    return images, target if resized is None else resized


def _resize(
    images: torch.Tensor, target: torch.Tensor | None, scale: float, mode: Mode
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if target is not None and (not isinstance(target, torch.Tensor) or target.ndim < 3):
        raise IncompatibleError(
            "`resize_targets=True` needs targets with height and width, (B, H, W) or (B, K, H, W), but they "
            f"have shape {tuple(getattr(target, 'shape', ()))}"
        )
    if mode == "crop":
        top, left = (int(torch.randint(size - int(scale * size), (1,))) for size in images.shape[-2:])
        cropped = _crop(images, top, left, scale)
        if target is None:
            return cropped, None
        height_ratio, width_ratio = target.shape[-2] / images.shape[-2], target.shape[-1] / images.shape[-1]
        return cropped, _crop(target, int(height_ratio * top), int(width_ratio * left), scale)
    return _nearest(images, scale), None if target is None else _nearest(target, scale)


def _crop(image: torch.Tensor, top: int, left: int, scale: float) -> torch.Tensor:
    height, width = (int(scale * size) for size in image.shape[-2:])
    return image[..., top : top + height, left : left + width]


def _nearest(image: torch.Tensor, scale: float) -> torch.Tensor:
    # Interpolation takes (B, C, H, W) of floating point numbers.
    is_map = image.ndim == 3
    pixels = image.unsqueeze(1) if is_map else image
    pixels = pixels if pixels.is_floating_point() else pixels.float()
    resized = nn.functional.interpolate(
        pixels, scale_factor=scale, mode="nearest", recompute_scale_factor=False
    )
    return (resized.squeeze(1) if is_map else resized).to(image.dtype)


def _check_scale(name: str, value: float) -> None:
    check_number(name, value, least=0)
    if value == 0:
        raise AlgorithmConfigError(f"`{name}` is 0, expected a number above 0")
