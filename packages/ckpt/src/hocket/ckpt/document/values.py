"""Canonical JSON of the leaves that are not tensors, for storage and for comparison between ranks."""

import json
from collections.abc import Mapping
from typing import Any

from hocket.ckpt.document.manifest import decode_value, encode_value
from hocket.ckpt.document.tree import TreeLeaf
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError

__all__ = ["canonical", "canonical_leaves", "from_canonical"]


def canonical(value: object, where: str) -> bytes:
    """Return a value's canonical JSON: sorted keys, no spaces, equal bytes for equal values.

    Args:
        value: None, bool, int, float, str, bytes, or tuples, lists and mappings of these.
        where: The value's name, for the error message.

    Raises:
        CheckpointStateError: The value holds another type.
    """
    try:
        encoded = _ordered(encode_value(value))
        return json.dumps(
            encoded, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":")
        ).encode()
    except CheckpointIncompatibleError as error:
        raise CheckpointStateError(f"`{where}` cannot be saved: {error}") from error
    except RecursionError as error:
        raise CheckpointStateError(
            f"`{where}` cannot be saved: it is nested too deep, or holds itself."
        ) from error
    except UnicodeEncodeError as error:
        raise CheckpointStateError(
            f"`{where}` cannot be saved: it holds text that is not valid Unicode (a lone surrogate). "
            "Save it as bytes."
        ) from error


def _ordered(encoded: Any) -> Any:
    """Sort the pairs of each `$map`: integers by value first, then all other keys by their text."""
    if isinstance(encoded, list):
        return [_ordered(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ordered = {key: _ordered(item) for key, item in encoded.items()}
    if "$map" in ordered:
        ordered["$map"].sort(key=_order_of_key)
    return ordered


def _order_of_key(pair: list[Any]) -> tuple[int, int, str]:
    key = pair[0]
    return (0, key, "") if type(key) is int else (1, 0, json.dumps(key, sort_keys=True))


def canonical_leaves(leaves: Mapping[str, TreeLeaf]) -> dict[str, bytes]:
    """Return each leaf's canonical JSON by name.

    Raises:
        CheckpointStateError: As for `canonical`.
    """
    return {name: canonical(leaf.value, name) for name, leaf in leaves.items()}


def from_canonical(text: bytes) -> object:
    """Decode a value from its canonical JSON; mappings are in key order."""
    return decode_value(json.loads(text))
