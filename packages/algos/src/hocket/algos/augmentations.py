"""Image augmentations of random strength, for RandAugment and AugMix; torchvision changes the pixels.

Each takes an image, PIL or a tensor `(C, H, W)`, and a severity from 0 to 10, draws its strength with
Python's generator, and returns an image of the same kind and size.

Source: Hendrycks et al., AugMix, 2020, and Cubuk et al., AutoAugment, 2018, for the operations and ranges.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.images import image_size, is_pil, vision

Augmentation = Callable[[Any, float], Any]

_METHOD = "augmentations"


def autocontrast(image: Any, severity: float) -> Any:  # noqa: ARG001 - it has no strength
    """Stretch each channel to the full range."""
    return _functional().autocontrast(image)


def equalize(image: Any, severity: float) -> Any:  # noqa: ARG001 - it has no strength
    """Flatten the histogram of each channel."""
    return _functional().equalize(image)


def posterize(image: Any, severity: float) -> Any:
    """Keep the 4 to 1 most significant bits of each pixel."""
    return _functional().posterize(image, 4 - int(_draw(severity) * 4 / 10))


def rotate(image: Any, severity: float) -> Any:
    """Rotate by up to 30 degrees."""
    degrees = _signed(int(_draw(severity) * 30 / 10))
    return _functional().rotate(image, degrees, interpolation=_bilinear())


def solarize(image: Any, severity: float) -> Any:
    """Invert pixels from a threshold on."""
    threshold = 256 - int(_draw(severity) * 256 / 10)
    if threshold > 255:  # no pixel is as bright, and torchvision refuses the threshold for tensors
        return image
    is_float = isinstance(image, torch.Tensor) and image.is_floating_point()
    return _functional().solarize(image, threshold / 255 if is_float else threshold)


def shear_x(image: Any, severity: float) -> Any:
    """Shear rows by a slope of up to 0.3."""
    return _affine(image, shear=[math.degrees(math.atan(_signed(_draw(severity) * 0.3 / 10))), 0.0])


def shear_y(image: Any, severity: float) -> Any:
    """Shear columns by a slope of up to 0.3."""
    return _affine(image, shear=[0.0, math.degrees(math.atan(_signed(_draw(severity) * 0.3 / 10)))])


def translate_x(image: Any, severity: float) -> Any:
    """Move by up to a third of the width."""
    width = image_size(_METHOD, image)[1]
    return _affine(image, translate=[-_signed(int(_draw(severity) * (width / 3) / 10)), 0])


def translate_y(image: Any, severity: float) -> Any:
    """Move by up to a third of the height."""
    height = image_size(_METHOD, image)[0]
    return _affine(image, translate=[0, -_signed(int(_draw(severity) * (height / 3) / 10))])


def color(image: Any, severity: float) -> Any:
    """Change the saturation."""
    return _functional().adjust_saturation(image, _draw_around_1(severity))


def contrast(image: Any, severity: float) -> Any:
    """Change the contrast."""
    return _functional().adjust_contrast(image, _draw_around_1(severity))


def brightness(image: Any, severity: float) -> Any:
    """Change the brightness; increases are damped, since images would saturate."""
    factor = _draw_around_1(severity)
    return _functional().adjust_brightness(image, factor * 0.75 if factor > 1 else factor)


def sharpness(image: Any, severity: float) -> Any:
    """Change the sharpness."""
    return _functional().adjust_sharpness(image, _draw_around_1(severity))


def color_original(image: Any, severity: float) -> Any:
    """Change the saturation, in AutoAugment's range."""
    return _functional().adjust_saturation(image, _draw_original(severity))


def contrast_original(image: Any, severity: float) -> Any:
    """Change the contrast, in AutoAugment's range."""
    return _functional().adjust_contrast(image, _draw_original(severity))


def brightness_original(image: Any, severity: float) -> Any:
    """Change the brightness, in AutoAugment's range."""
    return _functional().adjust_brightness(image, _draw_original(severity))


def sharpness_original(image: Any, severity: float) -> Any:
    """Change the sharpness, in AutoAugment's range."""
    return _functional().adjust_sharpness(image, _draw_original(severity))


_SAFE: list[Augmentation] = [
    autocontrast,
    equalize,
    posterize,
    rotate,
    solarize,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
]

augmentation_sets: dict[str, list[Augmentation]] = {
    "all": [*_SAFE, color, contrast, brightness, sharpness],
    "safe": list(_SAFE),
    "original": [*_SAFE, color_original, contrast_original, brightness_original, sharpness_original],
}
"""`"safe"` lacks those that resemble ImageNet-C's corruptions; `"original"` has AutoAugment's ranges."""


def find_augmentations(given: str | Sequence[Augmentation]) -> Sequence[Augmentation]:
    """Return the augmentations of a named set, or those given.

    Raises:
        AlgorithmConfigError: The name is unknown, or there is no augmentation.
    """
    if isinstance(given, str):
        if given not in augmentation_sets:
            names = ", ".join(map(repr, augmentation_sets))
            raise AlgorithmConfigError(f"`augmentation_set` is {given!r}, expected one of {names}")
        return augmentation_sets[given]
    if not given or not all(callable(function) for function in given):
        raise AlgorithmConfigError(
            f"`augmentation_set` is {given!r}, expected a name or functions (image, severity) -> image"
        )
    return given


def map_images(change: Callable[[Any], Any], images: Any) -> Any:
    """Apply a function to an image, or to each image of a batch `(B, C, H, W)` or list."""
    if isinstance(images, torch.Tensor) and images.ndim == 4:
        return torch.stack([change(image) for image in images])
    if isinstance(images, list | tuple):
        return type(images)(change(image) for image in images)
    image_size(_METHOD, images)  # raises for anything but an image
    return change(images)


def as_floats(image: Any) -> torch.Tensor:
    """Return an image's pixels in fp32, in its own range."""
    tensor = vision(_METHOD).pil_to_tensor(image) if is_pil(image) else image
    return tensor.float()  # type: ignore[no-any-return]


def like(image: Any, pixels: torch.Tensor) -> Any:
    """Return fp32 pixels as an image of the kind and dtype of `image`."""
    if is_pil(image):
        return vision(_METHOD).to_pil_image(pixels.to(torch.uint8), mode=image.mode)
    return pixels.to(image.dtype)


def _functional() -> Any:
    return vision(_METHOD)


def _bilinear() -> Any:
    return _functional().InterpolationMode.BILINEAR


def _affine(image: Any, *, shear: Sequence[float] = (0.0, 0.0), translate: Sequence[int] = (0, 0)) -> Any:
    return _functional().affine(
        image,
        angle=0.0,
        translate=list(translate),
        scale=1.0,
        shear=list(shear),
        interpolation=_bilinear(),
        center=[0.0, 0.0],
    )


def _draw(severity: float) -> float:
    return random.uniform(0.1, severity)


def _signed(value: Any) -> Any:
    return -value if random.random() > 0.5 else value


def _draw_around_1(severity: float) -> float:
    if random.random() > 0.5:
        return random.uniform(1, severity)
    return random.uniform(1 - 0.09 * severity, 1)


def _draw_original(severity: float) -> float:
    return _draw(severity) * 1.8 / 10 + 0.1
