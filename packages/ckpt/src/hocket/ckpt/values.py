"""The leaves that are no tensors: their checked JSON form, and digests to compare them between ranks."""

import json
from collections.abc import Mapping

from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointStateError
from hocket.ckpt.manifest import ValueRecord, encode_value
from hocket.ckpt.tree import Leaf

__all__ = ["canonical", "canonical_leaves", "value_records"]


def canonical(value: object, where: str) -> bytes:
    """A value's JSON as bytes that are equal where the values are: keys sorted, no spaces.

    Args:
        value: None, bool, int, float, str, bytes, or tuples, lists and mappings of these.
        where: The value's name, for the message.

    Raises:
        CheckpointStateError: Something else is in it.
    """
    try:
        encoded = encode_value(value)
        return json.dumps(encoded, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    except CheckpointIncompatibleError as error:
        raise CheckpointStateError(f"`{where}` cannot be saved: {error}") from error
    except RecursionError as error:
        raise CheckpointStateError(f"`{where}` cannot be saved: it is nested too deep, or holds itself.") from error
    except UnicodeEncodeError as error:
        raise CheckpointStateError(
            f"`{where}` cannot be saved: it holds text that is no Unicode (a lone surrogate). Save it as bytes."
        ) from error


def canonical_leaves(leaves: Mapping[str, Leaf]) -> dict[str, bytes]:
    """Each leaf's canonical form by its name. Raises as `canonical`."""
    return {name: canonical(leaf.value, name) for name, leaf in leaves.items()}


def value_records(leaves: Mapping[str, Leaf]) -> dict[str, ValueRecord]:
    """The manifest's records of leaves."""
    return {name: ValueRecord(path=leaf.path, value=leaf.value) for name, leaf in leaves.items()}
