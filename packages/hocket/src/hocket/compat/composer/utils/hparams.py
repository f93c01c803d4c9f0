"""Settings as plain values, as `composer.utils`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


def extract_hparams(locals_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings among local variables.

    An object with `local_hparams` becomes `{name of its class: local_hparams}`, an enum's member becomes its
    value, and any other object the name of its class. `self`, `__class__` and private names are left out.
    """
    return {
        name: _plain(value)
        for name, value in locals_dict.items()
        if name != "self" and not name.startswith("_")
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "local_hparams"):
        return {type(value).__name__: value.local_hparams}
    return type(value).__name__


def convert_nested_dict_to_flat_dict(nested_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one flat dict, whose names join the levels with `/`."""
    flat: dict[str, Any] = {}
    for name, value in nested_dict.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Mapping) and value:
            flat |= convert_nested_dict_to_flat_dict(value, path)
        else:
            flat[path] = value
    return flat


def convert_flat_dict_to_nested_dict(flat_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts from a flat dict whose names join the levels with `/`."""
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *parents, name = path.split("/")
        inner = nested
        for level in parents:
            inner = inner.setdefault(level, {})
        inner[name] = value
    return nested
