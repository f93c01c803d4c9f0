"""Access to the items of a batch of any type, without changes to the object that the loader returned."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hocket.algos.errors import IncompatibleError
from hocket.trainer.data.batch_tree import rebuilt, tensors

Getter = Callable[[Any], Any]
Setter = Callable[[Any, Any], Any]
ItemKey = Any
"""An index, a key, an attribute's name, or a pair (getter, setter) of functions."""


def get_item(batch: Any, key: ItemKey) -> Any:
    """Return the part of `batch` that `key` names.

    Raises:
        IncompatibleError: The batch has no such part.
    """
    if _is_pair(key):
        return key[0](batch)
    try:
        if isinstance(key, str) and not isinstance(batch, Mapping):
            return getattr(batch, key)
        return batch[key]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise IncompatibleError(
            f"a batch of type {type(batch).__name__} has no item {key!r}{_known(batch)}. Give the key of "
            "the item, or a pair (getter, setter)"
        ) from error


def with_item(batch: Any, key: ItemKey, value: Any) -> Any:
    """Return a shallow copy of `batch` with `value` in the place that `key` names.

    Raises:
        IncompatibleError: A batch of this type cannot be changed in that place.
    """
    if hasattr(batch, "_replace") and isinstance(key, str):
        return batch._replace(**{key: value})
    if isinstance(batch, tuple) and not _is_pair(key) and not isinstance(key, str):
        items = [*batch]
        items[key] = value
        return rebuilt(batch, items)
    changed = copy.copy(batch)
    if _is_pair(key):
        answer = key[1](changed, value)
        return changed if answer is None else answer
    try:
        if isinstance(key, str) and not isinstance(batch, Mapping):
            setattr(changed, key, value)
        else:
            changed[key] = value
    except (TypeError, AttributeError) as error:
        raise IncompatibleError(
            f"item {key!r} of a batch of type {type(batch).__name__} cannot be changed. Give a pair "
            "(getter, setter)"
        ) from error
    return changed


def select_rows(batch: Any, rows: torch.Tensor | slice, num_rows: int) -> Any:
    """Return a shallow copy of a batch with some of its samples only.

    Samples are taken from each tensor of length `num_rows` in the batch's mappings, lists and tuples, and
    from each list of that length without tensors in it; for the latter, `rows` is read back from the device.
    All else is passed on whole.

    Args:
        batch: A tensor, a mapping, a list or a tuple; any other object is returned itself.
        rows: `(R,)` int, the indices of the samples, or a slice.
        num_rows: The number of samples in the batch.
    """
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.ndim > 0 and batch.shape[0] == num_rows else batch
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = select_rows(value, rows, num_rows)
        return changed
    if not isinstance(batch, list | tuple):
        return batch
    if len(batch) == num_rows and not any(True for _ in tensors(batch, into_objects=False)):
        if isinstance(rows, slice):
            return batch[rows]
        return type(batch)(batch[row] for row in rows.tolist())
    parts = [select_rows(part, rows, num_rows) for part in batch]
    return rebuilt(batch, parts)


def _is_pair(key: ItemKey) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(callable(part) for part in key)


def _known(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"; it has {', '.join(repr(key) for key in batch)}"
    return f"; it has {len(batch)} items" if isinstance(batch, tuple | list) else ""
