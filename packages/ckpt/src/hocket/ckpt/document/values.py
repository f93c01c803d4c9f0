"""Values that are not tensors as JSON: tagged for storage, and canonical for comparison between ranks."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from hocket.ckpt.document.tree import TreeLeaf
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError

__all__ = ["canonical", "canonical_leaves", "decode_value", "encode_value", "from_canonical"]

_INT_BITS = 8192  # Python limits the conversion of larger integers from and to decimal text


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
            f"`{where}` cannot be saved: it is nested too deep, or holds itself"
        ) from error
    except UnicodeEncodeError as error:
        raise CheckpointStateError(
            f"`{where}` cannot be saved: it holds text that is not valid Unicode (a lone surrogate). "
            "Save it as bytes"
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


def encode_value(value: Any) -> Any:
    """Encode a Python value as JSON, with tags for values that JSON cannot represent.

    Raises:
        CheckpointIncompatibleError: The value holds something other than None, bool, int, float, str, bytes,
            tuple, list or a mapping of these, or an integer of more than 8,192 bits; the message gives its
            path within the value.
    """
    return _encode(value, "")


def _encode(value: Any, path: str) -> Any:
    # Exact types only: a subclass (an enum, a NumPy float) would be read back as its base type.
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS:
            location = f" at `{path}`" if path else ""
            raise CheckpointIncompatibleError(
                f"an integer of {value.bit_length()} bits{location}; expected at most {_INT_BITS}. "
                "Save it as bytes"
            )
        return value if -(2**53) <= value <= 2**53 else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [
            [_encode(key, f"{path} key"), _encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        return {"$map": pairs}
    location = f" at `{path}`" if path else ""
    raise CheckpointIncompatibleError(
        f"a `{kind.__module__}.{kind.__qualname__}`{location} cannot be stored in a checkpoint; expected a "
        "tensor, None, bool, int, float, str, bytes, tuple, list or mapping. Convert it in the "
        "`state_dict` that returns it"
    )


def decode_value(raw: Any) -> Any:
    """Decode a value that `encode_value` encoded.

    Raises:
        ValueError: A tag is unknown or has invalid content.
    """
    if isinstance(raw, list):
        return [decode_value(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if len(raw) == 1:
        tag, inner = next(iter(raw.items()))
        if tag == "$float":
            return float(inner)
        if tag == "$int":
            return int(inner)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
        if tag == "$tuple":
            return tuple(decode_value(item) for item in inner)
        if tag == "$map":
            return {decode_value(key): decode_value(item) for key, item in inner}
    if unknown := [key for key in raw if key.startswith("$")]:
        # A mapping with such a key is written as `$map`.
        raise ValueError(f"`{unknown[0]:.40}` is not a known tag, or is not the only key of its object")
    return {key: decode_value(item) for key, item in raw.items()}
