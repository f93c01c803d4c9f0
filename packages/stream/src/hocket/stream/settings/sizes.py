"""Parsing of sizes such as `64mb`."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from hocket.stream.errors import ConfigError

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([kmgt])i?)?b?")
_MOST = (1 << 63) - 1


def parse_bytes(name: str, value: int | str) -> int:
    """Return a size in bytes from an integer or a string such as `64mb`, `64MiB` or `1.5 G`.

    Suffixes are powers of 1,024.

    Raises:
        ConfigError: `value` is neither, or not from 1 to below 2^63.
    """
    size = 0
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip().lower())
        if found:
            size = int(Fraction(found[1]) * 1024 ** " kmgt".index(found[2] or " "))
    elif not isinstance(value, bool):
        try:
            size = operator.index(value)
        except TypeError:
            size = 0
    if not 1 <= size <= _MOST:
        raise ConfigError(
            f"`{name}` is {value!r:.100}: expected bytes from 1 to below 2^63, such as 67108864 or '64mb'"
        )
    return size
