"""Values in tuples, lists and mappings: batches, hyperparameters, arguments that may be one or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from hocket.trainer.data.batch_access import get_item, set_item


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return None, a single value, several, or the values of a mapping, as a tuple."""
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray, torch.Tensor, np.ndarray)):
        return (x,)
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Iterable) else (x,)


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Return a list, tuple, mapping or single value with a function applied to each value."""
    if isinstance(collection, Mapping):
        return {name: map_fn(value) for name, value in collection.items()}
    if isinstance(collection, (list, tuple)):
        return type(collection)(map_fn(value) for value in collection)
    return map_fn(collection)


def batch_get(batch: Any, key: Any) -> Any:
    """Return a part of a batch, as `hocket.trainer.data.batch_access.get_item`.

    A tuple or list is an index of a tensor or array, as `batch[key]`, if it can be one.

    Raises:
        DataError: If the batch has no such part.
        ValueError: If the key is a sequence of functions and no pair.
    """
    _check(key)
    if _is_index(batch, key):
        try:
            return batch[_index(key)]
        except (IndexError, TypeError):
            pass  # the key names one part for each element, as for any other batch
    return get_item(batch, key)


def batch_set(batch: Any, key: Any, value: Any) -> Any:
    """Set a part of a batch; return the batch, which is a new object for tuples.

    Args:
        batch: As for `batch_get`.
        key: As for `batch_get`; a function alone is `(batch, value) -> batch`.
        value: The new part; a sequence for several.

    Raises:
        DataError: If the batch has no such part.
        ValueError: If there are not as many parts as keys.
    """
    _check(key)
    if callable(key):
        return key(batch, value)
    if _is_index(batch, key):
        index = _index(key)
        try:
            batch[index]
        except (IndexError, TypeError):
            pass
        else:
            batch[index] = value
            return batch
    return set_item(batch, key, value)


def _is_index(batch: Any, key: Any) -> bool:
    is_array = isinstance(batch, (torch.Tensor, np.ndarray))
    return is_array and isinstance(key, (list, tuple)) and not any(callable(one) for one in key)


def _index(key: Any) -> Any:
    """Return a list with slices as a tuple, with one element for each dim."""
    return tuple(key) if any(isinstance(one, slice) for one in key) else key


def _check(key: Any) -> None:
    if isinstance(key, (list, tuple)) and key and all(callable(one) for one in key) and len(key) != 2:
        raise ValueError(f"`key` has {len(key)} functions; expected a pair (getter, setter)")


__all__ = ["batch_get", "batch_set"]


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
