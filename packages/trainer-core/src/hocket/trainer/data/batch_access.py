"""Reading and replacing one part of a batch, for methods that work on batches of any shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.trainer.errors import DataError


def get_item(batch: Any, key: Any) -> Any:
    """Return a part of a batch.

    Args:
        batch: A mapping, a sequence, a tensor, or an object with attributes.
        key: An index, a key or attribute name, a list of them (for a tuple of parts), a function of the
            batch, or a pair of functions (getter, setter).

    Raises:
        DataError: If the batch has no such part.
    """
    if _is_pair_of_functions(key):
        return key[0](batch)
    if callable(key):
        return key(batch)
    if isinstance(key, (list, tuple)):
        return tuple(get_item(batch, one) for one in key)
    try:
        if isinstance(key, str) and not isinstance(batch, Mapping):
            return getattr(batch, key)
        return batch[key]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise DataError(_missing(batch, key)) from error


def set_item(batch: Any, key: Any, value: Any) -> Any:
    """Set a part of a batch; return the batch, which is a new object for tuples.

    Args:
        batch: As for `get_item`.
        key: As for `get_item`, but not a single function; with a list of keys, `value` is a sequence.
        value: The new part.

    Raises:
        DataError: If the batch has no such part, or the key cannot be set.
    """
    if _is_pair_of_functions(key):
        changed = key[1](batch, value)
        return batch if changed is None else changed
    if callable(key):
        raise DataError("a function alone reads a part of a batch; pass the pair (getter, setter) to set it")
    if isinstance(key, (list, tuple)):
        for part_key, part in zip(key, value, strict=True):
            batch = set_item(batch, part_key, part)
        return batch
    get_item(batch, key)  # raises if the part is missing
    if isinstance(key, str) and not isinstance(batch, Mapping):
        if hasattr(batch, "_replace"):
            return batch._replace(**{key: value})
        setattr(batch, key, value)
        return batch
    if isinstance(batch, tuple):
        items = list(batch)
        items[key] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch[key] = value
    return batch


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, Sequence) and len(key) == 2 and all(callable(one) for one in key)


def _missing(batch: Any, key: Any) -> str:
    if isinstance(batch, Mapping):
        description = f"has the keys {sorted(map(str, batch))}"
    elif isinstance(batch, (list, tuple)):
        description = f"has {len(batch)} items"
    else:
        description = "has no such attribute"
    return f"there is no {key!r} in the batch, a `{type(batch).__name__}` that {description}"
