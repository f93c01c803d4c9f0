"""Encodings of images. Pillow is imported when the first image is encoded or decoded."""

from __future__ import annotations

import functools
import io
import itertools
import struct
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hocket.stream.encodings.base import Column, Encoding, Plain, refuse, refuse_encoded, spoilt
from hocket.stream.errors import ConfigError, SampleError, ShardCorruptError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Accepted formats of encoded images. Pillow reads more, some of them by running other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MAGICS = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF87a", b"GIF89a", b"BM",
    b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
)  # fmt: skip

#: Errors of Pillow for damaged files.
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error)

#: Bits per raw pixel, by mode; rows start at whole bytes.
_MODE_BITS = {
    "1": 1, "L": 8, "P": 8, "LA": 16, "La": 16, "PA": 16, "I;16": 16, "I;16B": 16, "I;16L": 16, "RGB": 24,
    "YCbCr": 24, "LAB": 24, "HSV": 24, "RGBA": 32, "RGBa": 32, "RGBX": 32, "CMYK": 32, "I": 32, "F": 32,
}  # fmt: skip


@functools.cache
def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "images are encoded and decoded by Pillow, which is not installed: "
            "`pip install 'hocket-stream[pillow]'`"
        ) from None
    return Image


@functools.cache
def _default_palette(mode: str) -> list[int]:
    """Return the palette of an image that is decoded from pixels."""
    palette: list[int] = _pillow().frombytes(mode, (1, 1), bytes(len(mode))).getpalette()
    return palette


def _check_image(value: Any) -> Image:
    if not isinstance(value, _pillow().Image):
        raise refuse(value, "a Pillow image, or the bytes of one that is encoded already")
    image: Image = value
    return image


class RawImage(Plain):
    """`pil`: width, height, mode and raw pixels. There is no place for a palette."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes of an image's size, mode and pixels."""
        image = _check_image(value)
        if image.mode in ("P", "PA") and image.getpalette() != _default_palette(image.mode):
            raise SampleError(
                f"the image has mode {image.mode} and a palette, which `pil` does not store: expected "
                "another mode; give the column `png`, which keeps palettes, or convert the image, as by "
                "`image.convert('RGB')`"
            )
        mode = image.mode.encode()
        return struct.pack("<3I", *image.size, len(mode)) + mode + image.tobytes()

    def decode_one(self, value: memoryview) -> Image:
        """Return the image."""
        width, height, length = struct.unpack("<3I", value[:12]) if len(value) >= 12 else (0, 0, 0)
        # Checked before Pillow allocates the pixels.
        mode = str(value[12 : 12 + length], "ascii", "replace")
        pixels = value[12 + length :]
        row_bytes = (width * _MODE_BITS.get(mode, 0) + 7) // 8
        if not row_bytes * height or row_bytes * height != len(pixels):
            raise spoilt(value, "a raw image: a size, a known mode, and as many pixels")
        image: Image = _pillow().frombytes(mode, (width, height), bytes(pixels))
        return image


class EncodedImage(Plain):
    """`jpeg` and `png`: the bytes of an image file, decoded on first access to its pixels.

    Args:
        kind: Pillow's name of the format to write.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def encode(self, value: Any) -> bytes:
        """Return the image's own file if it is an unchanged JPEG from a file, else the encoded image."""
        image = _check_image(value)
        if self._kind == "JPEG" and (original := _original(image)) is not None:
            return original
        out = io.BytesIO()
        try:
            image.save(out, format=self._kind)
        except (OSError, ValueError) as error:
            raise SampleError(f"{error}: expected an image that {self._kind} can hold") from None
        return out.getvalue()

    def check_encoded(self, data: bytes) -> None:
        """Check the first bytes, without Pillow: decoding is slow, and `verify` does it."""
        if not is_image(data):
            raise refuse_encoded(data)

    def decode_one(self, value: memoryview) -> Image:
        """Return the image; its pixels are decoded on first access."""
        return open_image(value)


def is_image(data: bytes) -> bool:
    """Return whether bytes begin as a file of an accepted format does."""
    return data.startswith(_MAGICS) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP")


def _original(image: Image) -> bytes | None:
    """Return the file of an unchanged JPEG, which encoding again would degrade; None for other images."""
    name = getattr(image, "filename", None)
    if image.format != "JPEG" or not name:
        return None
    try:
        data = Path(name).read_bytes()
        original = _pillow().open(io.BytesIO(data))
        if (original.size, original.mode) != (image.size, image.mode):
            return None
        # Pillow empties `tile` when it decodes; before that there are no pixels to change.
        is_same = getattr(image, "tile", []) or original.tobytes() == image.tobytes()
    except OSError:
        return None
    return data if is_same else None


def open_image(value: bytes | memoryview) -> Image:
    """Return the image of a file; its pixels are decoded on first access.

    Raises:
        ShardCorruptError: The bytes are no image of an accepted format.
    """
    pillow = _pillow()
    try:
        image: Image = pillow.open(io.BytesIO(value), formats=_FORMATS)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError):
        raise spoilt(memoryview(value), f"an image of {', '.join(_FORMATS)}") from None
    return image


def decode_whole(data: bytes) -> None:
    """Decode all pixels of all frames of an image file, and forget them.

    Raises:
        SampleError: It is no image of an accepted format, or it is truncated or damaged.
    """
    pillow = _pillow()
    stream = io.BytesIO(data)
    try:
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
            image.verify()  # the checksums of a PNG, up to its end
        with pillow.open(stream, formats=_FORMATS) as image:
            image.draft("L", (1, 1))  # reads all of a JPEG, and computes few of its pixels
            for number in itertools.count():
                try:
                    image.seek(number)
                except EOFError:
                    break
                image.load()
            # Pillow takes a missing end mark for the end of the frames.
            if image.format == "GIF" and data[stream.tell() - 1 : stream.tell()] != b";":
                raise OSError("image file is truncated after a frame")
    except (*_DAMAGE, pillow.DecompressionBombError) as error:
        raise SampleError(f"{error}: expected a whole image of {', '.join(_FORMATS)}") from None


def load_pixels(column: Column) -> None:
    """Decode the pixels of a column's images, or lists of them, in place.

    Raises:
        ShardCorruptError: An image is truncated or cannot be decoded.
    """
    for value in column:
        for image in value if isinstance(value, list) else [value]:
            try:
                image.load()
            except (OSError, SyntaxError, ValueError, _pillow().DecompressionBombError) as error:
                raise ShardCorruptError(
                    f"an image of {image.width}×{image.height} pixels: {error}: expected one that is whole; "
                    "restore the shard from its source"
                ) from None


class ImageList(Plain):
    """`list[...]`: 4 zero bytes, the count, the sizes, the elements; `jpeg_array` without the zero bytes.

    Args:
        element: Encoding of the elements.
        header: Bytes before the count.
    """

    def __init__(self, element: Encoding, *, header: bytes = bytes(4)) -> None:
        self._element = element
        self._header = header

    def store(self, value: Any) -> bytes:
        """Return the bytes of a list; elements that are bytes have to be images too."""
        if isinstance(value, (list, tuple)):
            items = (bytes(item) if isinstance(item, bytearray) else item for item in value)
            value = [self._element.store(item) for item in items]
        return super().store(value)

    def encode(self, value: Any) -> bytes:
        """Return the sizes and the bytes of the elements."""
        if not isinstance(value, (list, tuple)):
            raise refuse(value, "a list of images")
        items = [
            bytes(item) if isinstance(item, (bytes, bytearray)) else self._element.encode(item)
            for item in value
        ]
        sizes = struct.pack(f"<{len(items) + 1}I", len(items), *map(len, items))
        return self._header + sizes + b"".join(items)

    def decode_one(self, value: memoryview) -> list[Any]:
        """Return the list of images."""
        start = len(self._header) + 4
        count = int.from_bytes(value[start - 4 : start], "little")
        end = start + 4 * count
        if len(value) < max(start, end):
            raise spoilt(value, "a list of images: a count and as many sizes")
        sizes = struct.unpack(f"<{count}I", value[start:end])
        if end + sum(sizes) != len(value):
            raise spoilt(value, "a list of images that fill its bytes")
        items = []
        for size in sizes:
            items.append(value[end : end + size])
            end += size
        return [self._decode(item) for item in items]

    def _decode(self, item: memoryview) -> Any:
        assert isinstance(self._element, Plain)
        return self._element.decode_one(item)
