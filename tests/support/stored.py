"""Data sets and checkpoints that several tests write or compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import hocket.ckpt
from hocket.ckpt.read.reader import Checkpoint
from hocket.stream import MDSWriter

NOISE_BYTES = 8000


def write_noise(out: str, count: int, *, first: int = 0, **options: Any) -> str:
    """Write samples of an id and 8,000 random bytes, and return where.

    Shards have the same sizes for any `first`, which is the id of the first sample.
    """
    settings = {"hashes": ["xxh3_64"]} | options
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=out, **settings) as writer:
        for number in range(first, first + count):
            writer.write({"id": number, "x": os.urandom(NOISE_BYTES)})
    return out


def check_stored(
    uri: object, expected: Mapping[str, Any], to_bytes: Callable[[Any], bytes] = lambda one: one.tobytes()
) -> Checkpoint:
    """Check that a checkpoint is sound and has exactly the expected tensors, bit for bit; return it.

    Args:
        uri: The checkpoint.
        expected: Arrays or tensors by name.
        to_bytes: Returns the bytes of one in C order.
    """
    checkpoint = hocket.ckpt.open(str(uri))
    assert set(checkpoint) == set(expected)
    for name, one in expected.items():
        assert checkpoint[name].shape == tuple(one.shape), name
        assert checkpoint[name].tobytes() == to_bytes(one), name
    assert hocket.ckpt.verify(str(uri)).is_sound
    return checkpoint
