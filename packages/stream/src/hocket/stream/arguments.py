"""Arguments as people give them: NumPy's numbers are numbers, and what does not fit is refused by name."""

from __future__ import annotations

import math
import operator

import numpy as np

from hocket.stream.errors import ConfigError

#: What native code and a state's readers take.
_MOST = (1 << 63) - 1


def whole(name: str, value: object, *, least: int = 0, most: int = _MOST) -> int:
    """Return a whole number as Python's own, so that it is JSON.

    Raises:
        ConfigError: It is no integer, or not in the range.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"`{name}` is {value!r:.100}: expected an integer from {least}") from None
    if not least <= number <= most:
        upper = "" if most == _MOST else f" to {most}"
        raise ConfigError(f"`{name}` is {number}: expected an integer from {least}{upper}")
    return number


def switch(name: str, value: object) -> bool:
    """Return True or False as Python's own.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"`{name}` is {value!r:.100}: expected True or False")
    return bool(value)


def seconds(name: str, value: object) -> float:
    """Return a time above 0 in seconds.

    Raises:
        ConfigError: It is no finite number above 0.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    number = float(value) if is_number else 0.0  # type: ignore[arg-type]
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"`{name}` is {value!r:.100}: expected a finite number of seconds above 0")
    return number
