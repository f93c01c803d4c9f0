"""Typed reading of single values of a DeepSpeed configuration; every error names the key and the value."""

from collections.abc import Mapping
from math import inf
from typing import Any

from hocket.dist.errors import ConfigError


def whole(block: Mapping[str, Any], name: str, where: str = "deepspeed_config") -> int | None:
    """Return a whole number of at least 1, or None if the key is absent.

    Args:
        block: The block of the configuration.
        name: The key.
        where: The block's name, for the message.

    Raises:
        ConfigError: The value is something else.
    """
    value = block.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON's 1e3 is parsed as a float
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"`{where}['{name}']` is {value!r}, expected a whole number from 1")
    return value


def positive(block: Mapping[str, Any], name: str, where: str = "deepspeed_config") -> float | None:
    """Return a finite number above 0, or None if the key is absent or 0; arguments as for `whole`.

    Raises:
        ConfigError: The value is something else.
    """
    value = block.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | None) or not 0 <= (value or 0) < inf:
        raise ConfigError(f"`{where}['{name}']` is {value!r}, expected a number above 0; 0 leaves it out")
    return float(value) if value else None


def is_on(block: Mapping[str, Any], name: str, where: str) -> bool:
    """Return whether a switch is on; False if the key is absent. Arguments as for `whole`.

    Raises:
        ConfigError: The value is not a boolean; the text "false" would otherwise count as true.
    """
    value = block.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"`{where}['{name}']` is {value!r}, expected true or false")
    return bool(value)


def one_of(*values: tuple[str, Any]) -> Any:
    """Return the value that is set, or None if none is; several values must be equal.

    Args:
        *values: Pairs of name and value.

    Raises:
        ConfigError: Two values differ.
    """
    present = [(name, value) for name, value in values if value is not None]
    for name, value in present[1:]:
        if value != present[0][1]:
            raise ConfigError(
                f"`deepspeed_config` has `{present[0][0]}` ({present[0][1]}) and `{name}` ({value}). Set "
                "only one"
            )
    return present[0][1] if present else None
