"""Validation of arguments. NumPy numbers are accepted; errors name the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import numpy as np

from hocket.stream.errors import ConfigError

#: The largest integer of native code and of saved states.
_MOST = (1 << 63) - 1

REMEDIES = {
    "predownload": "give `prefetch_bytes=`, the size of the shards that are fetched ahead",
    "drop_last": "give `tail='drop'`",
    "input_dir": "give `remote=` or `local=`",
    "max_cache_size": "give `cache_limit=`",
    "seed": "give `shuffle_seed=`",
    "num_workers": "give it to the `StreamingDataLoader`",
}
"""What to give for arguments of mosaicml-streaming, LitData and torch, which no near name here stands for."""


def whole(name: str, value: object, *, least: int = 0, most: int = _MOST) -> int:
    """Return an integer as a Python `int`, which JSON can hold.

    Raises:
        ConfigError: `value` is not an integer, or out of range.
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
    """Return a boolean as a Python `bool`.

    Raises:
        ConfigError: `value` is not a boolean.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"`{name}` is {value!r:.100}: expected True or False")
    return bool(value)


def seconds(name: str, value: object) -> float:
    """Return a number of seconds above 0.

    Raises:
        ConfigError: `value` is not a finite number above 0.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    number = float(value) if is_number else 0.0  # type: ignore[arg-type]
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"`{name}` is {value!r:.100}: expected a finite number of seconds above 0")
    return number


def refuse_foreign(owner: str, names: Iterable[str]) -> None:
    """Refuse the first name that has another one here.

    Args:
        owner: The class that was called.
        names: The names of its arguments that it does not know itself.

    Raises:
        TypeError: There is such a name; the message says what to give.
    """
    for name in names:
        if name in REMEDIES:
            raise TypeError(f"`{owner}` has no argument `{name}`; {REMEDIES[name]}")
