"""Lookup of encodings by their names in the index."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from hocket.stream.encodings.arrays import SCALARS, Int, Scalar, resolve_array
from hocket.stream.encodings.base import Encoding
from hocket.stream.encodings.images import EncodedImage, ImageList, RawImage
from hocket.stream.encodings.text import Bytes, Json, Pickled, Text, WrittenNumber
from hocket.stream.errors import ConfigError, IndexCorruptError

_IMAGES: dict[str, Callable[[], Encoding]] = {
    "pil": RawImage,
    "jpeg": lambda: EncodedImage("JPEG"),
    "png": lambda: EncodedImage("PNG"),
}
_PLAIN: dict[str, Callable[[], Encoding]] = {
    "bytes": Bytes,
    "str": Text,
    "int": Int,
    "str_int": lambda: WrittenNumber(int),
    "str_float": lambda: WrittenNumber(float),
    "str_decimal": lambda: WrittenNumber(Decimal),
    "json": Json,
    "pkl": Pickled,
    "jpeg_array": lambda: ImageList(EncodedImage("JPEG"), header=b""),
    "jpegarray": lambda: ImageList(EncodedImage("JPEG"), header=b""),
    **_IMAGES,
}
ADDED: dict[str, Callable[[], Encoding]] = {}
"""Encodings that a program has added, by name; `hocket.compat.streaming` fills it."""

_ARRAYS = ("ndarray", "ndarray:<dtype>", "ndarray:<dtype>:<shape>")
_SUPPORTED = ", ".join(
    f"`{name}`" for name in (*_PLAIN, *_ARRAYS, *SCALARS, *(f"list[{name}]" for name in _IMAGES))
)


def resolve_encoding(name: str, *, allow_unsafe_types: bool = False) -> Encoding:
    """Return the encoding called `name`.

    Raises:
        ConfigError: The encoding is unknown, or it runs code and `allow_unsafe_types` is not set.
    """
    if name == "pkl" and not allow_unsafe_types:
        raise ConfigError(
            "encoding `pkl` runs code from the data when it is decoded; "
            "give `allow_unsafe_types=True` only for data that you trust"
        )
    if name in ADDED:
        return ADDED[name]()
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in SCALARS:
        return Scalar(name)
    kind, _, rest = name.partition(":")
    if kind == "ndarray":
        return resolve_array(name, rest)
    element = name.removeprefix("list[").removesuffix("]")
    if name == f"list[{element}]" and element in _IMAGES:
        return ImageList(_IMAGES[element]())
    raise ConfigError(f"encoding `{name}` is not supported: expected one of {_SUPPORTED}")


def is_encoding(name: str) -> bool:
    """Return whether there is an encoding called `name`."""
    try:
        resolve_encoding(name, allow_unsafe_types=True)
    except ConfigError:
        return False
    return True


def check_width(name: str, encoding: Encoding, width: int | None, origin: str) -> None:
    """Check the size of a column in the index against its encoding.

    Raises:
        IndexCorruptError: The sizes differ.
    """
    if encoding.width != width:
        raise IndexCorruptError(
            f"the index `{origin}` is not valid: column `{name}` has `column_sizes` {width}, "
            f"expected {encoding.width}"
        )
