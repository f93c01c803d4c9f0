"""Key pairing: matches the keys of a state tree with those of a checkpoint, whatever wrappers add to them."""

from collections.abc import Collection, Mapping
from typing import Any

from hocket.ckpt.document.tree import clean_key

__all__ = ["cleaned", "paired", "with_own_names"]


def paired(keys: Collection[Any], stored: Mapping[Any, object]) -> dict[Any, Any]:
    """Map the tree's keys to the checkpoint's: equal keys first, then keys equal after `_spelled`."""
    found = {key: key for key in keys if key in stored}
    if len(found) == len(keys):
        return found
    others = {_spelled(key): key for key in reversed(stored) if key not in found}
    for key in keys:
        if key not in found and _spelled(key) in others:
            found[key] = others.pop(_spelled(key))
    return found


def _spelled(key: Any) -> Any:
    """Return a key without wrapper prefixes, and an integer as text: DCP saves integer keys as strings."""
    return str(key) if type(key) is int else cleaned(key)


def cleaned(key: Any) -> Any:
    """Return a key without wrapper prefixes."""
    return clean_key(key) if isinstance(key, str) else key


def with_own_names(into: Any, groups: Any) -> Any:
    """Return the checkpoint's parameter groups with the parameter names of the tree."""
    if not (isinstance(into, list) and isinstance(groups, list)):
        return groups
    names = {cleaned(name): name for group in into for name in _params(group)}
    return [
        {**group, "params": [names.get(cleaned(name), name) for name in params]}
        if (params := _params(group))
        else group
        for group in groups
    ]


def _params(group: object) -> list[Any]:
    params = group.get("params") if isinstance(group, Mapping) else None
    return params if isinstance(params, list) and all(isinstance(name, str) for name in params) else []
