"""Images as tensors, whether they come as tensors or as PIL images; torchvision is needed for PIL only."""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hocket.algos.errors import IncompatibleError
from hocket.trainer.errors import MissingExtraError

Image = TypeVar("Image")
"""A tensor `(..., C, H, W)` or a PIL image."""


def vision(method: str) -> Any:
    """Import `torchvision.transforms.v2.functional`.

    Raises:
        MissingExtraError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision.transforms.v2.functional")
    except ImportError as error:
        raise MissingExtraError(
            f"`{method}` needs torchvision; `pip install 'hocket-algos[torchvision]'`"
        ) from error


def is_pil(image: Any) -> bool:
    """Return whether `image` is a PIL image, without importing PIL."""
    return any(kind.__module__.startswith("PIL.") for kind in type(image).__mro__)


def image_size(method: str, image: Any) -> tuple[int, int]:
    """Return the height and width of a tensor or PIL image.

    Raises:
        IncompatibleError: The image is neither, or is a tensor without rows and columns.
    """
    if is_pil(image):
        return image.size[1], image.size[0]
    if isinstance(image, torch.Tensor) and image.ndim >= 2:
        return image.shape[-2], image.shape[-1]
    received = (
        f"shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else f"a {type(image).__name__}"
    )
    raise IncompatibleError(f"`{method}` takes PIL images or tensors (..., H, W), but got {received}")


def on_tensor(method: str, image: Image, change: Callable[[torch.Tensor], torch.Tensor]) -> Image:
    """Apply a function of tensors to a tensor or PIL image, and return the result in the image's own kind."""
    if not is_pil(image):
        changed: Any = change(image)  # type: ignore[arg-type]
        return changed  # type: ignore[no-any-return]
    functional = vision(method)
    tensor = functional.pil_to_tensor(image)
    result: Any = functional.to_pil_image(change(tensor), mode=image.mode)  # type: ignore[attr-defined]
    return result  # type: ignore[no-any-return]
