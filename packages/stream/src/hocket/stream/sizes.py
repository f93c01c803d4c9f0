"""Sizes in bytes, as people write them."""

from __future__ import annotations

import operator
import re

from hocket.stream.errors import ConfigError

_POWERS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def parse_bytes(name: str, value: int | str) -> int:
    """Return a size given as bytes, or as a text such as `64mb` or `1.5 GB`.

    Suffixes are powers of 1,024.

    Raises:
        ConfigError: It is neither, or is below 1.
    """
    size = 0
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?b)?", value.strip().lower())
        if found:
            size = int(float(found[1]) * _POWERS[found[2] or ""])
    elif not isinstance(value, bool):
        try:
            size = operator.index(value)
        except TypeError:
            size = 0
    if size < 1:
        raise ConfigError(f"`{name}` is {value!r}: expected bytes from 1, such as 67108864 or '64mb'")
    return size
