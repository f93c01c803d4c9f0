"""Images for loggers: captured without waiting, converted to 8 bits on the logger's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hocket.trainer.errors import LoggerError
from hocket.trainer.log.deferred_value import capture_tensor


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Images as loggers receive them.

    Attributes:
        images: Each `(H, W, C) uint8` on the CPU; C is 1, 3 or 4.
        masks: By mask name, one `(H, W)` integer tensor per image.
        mask_class_labels: Class names by class number, for all masks.
        use_table: Whether to show them as a table with one row per image, where the logger has tables.
    """

    images: list[Tensor]
    masks: dict[str, list[Tensor]] = field(default_factory=dict)
    mask_class_labels: dict[int, str] = field(default_factory=dict)
    use_table: bool = True


def capture_images(
    images: Any,
    *,
    channels_last: bool,
    masks: Mapping[str, Any] | None,
    mask_class_labels: Mapping[int, str] | None,
    use_table: bool,
) -> Callable[[], ImageBatch]:
    """Capture images as they are now and return a reader. Does not wait for the device.

    Args:
        images: One image `(C, H, W)` or `(H, W)`, several `(N, C, H, W)`, or a sequence of images; tensors
            or arrays. Floats in [0, 1] are scaled to [0, 255]; other floats from their own minimum and
            maximum. Integers are clamped to [0, 255].
        channels_last: Whether the channels are the last dim.
        masks: By name, `(N, H, W)` class numbers, one mask per image.
        mask_class_labels: Class names by class number.
        use_table: Passed on in the `ImageBatch`.

    Returns:
        A function that waits for the values and converts them once, whichever thread calls it first.

    Raises:
        LoggerError: If the shapes are not those of images, or a mask has another number of images.
    """
    batches = [capture_tensor(image) for image in _split(images)]
    captured_masks = {
        name: [capture_tensor(mask) for mask in _split(mask, dims=2)] for name, mask in (masks or {}).items()
    }
    for name, parts in captured_masks.items():
        if len(parts) != len(batches):
            raise LoggerError(
                f"the mask `{name}` has {len(parts)} images and `images` has {len(batches)}; "
                "pass one mask per image"
            )
    lock, converted = threading.Lock(), list[ImageBatch]()

    def read() -> ImageBatch:
        with lock:
            if not converted:
                converted.append(
                    ImageBatch(
                        images=[_to_bytes(image(), channels_last=channels_last) for image in batches],
                        masks={
                            name: [mask().to(torch.int64) for mask in parts]
                            for name, parts in captured_masks.items()
                        },
                        mask_class_labels=dict(mask_class_labels or {}),
                        use_table=use_table,
                    )
                )
            return converted[0]

    return read


def _split(images: Any, *, dims: int = 3) -> list[Tensor]:
    """Return the single images of a batch or sequence; a missing batch dim is added."""
    if isinstance(images, Sequence):
        return [part for image in images for part in _split(image, dims=dims)]
    tensor = images.detach() if isinstance(images, Tensor) else torch.as_tensor(images)
    if tensor.dim() == dims + 1:
        return list(tensor.unbind())
    if tensor.dim() in (2, dims):
        return [tensor]
    raise LoggerError(
        f"an image has shape {tuple(tensor.shape)}; expected (C, H, W), (H, W) or a batch (N, C, H, W)"
    )


def _to_bytes(image: Tensor, *, channels_last: bool) -> Tensor:
    image = image.cpu()
    if image.dim() == 2:
        image = image[..., None]
    elif not channels_last:
        image = image.permute(1, 2, 0)
    if image.shape[-1] not in (1, 3, 4):
        raise LoggerError(
            f"an image has {image.shape[-1]} channels; expected 1, 3 or 4, with "
            f"`channels_last={channels_last}`"
        )
    if image.is_floating_point():
        image = image.float()
        low, high = image.aminmax()
        if low < 0 or high > 1:
            image = (image - low) / (high - low).clamp_min(1e-12)
        image = image * 255
    elif image.dtype == torch.bool:
        image = image.to(torch.uint8) * 255
    return image.clamp(0, 255).to(torch.uint8).contiguous()
