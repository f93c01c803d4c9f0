"""Functions that read and replace a part of a batch by Composer's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hocket.trainer.data.batch_access import get_item, set_item


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
