"""The records of tensors and values in a checkpoint's document, of any format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.dtypes import ITEM_BYTES

__all__ = ["PathItem", "PerRank", "TensorRecord", "ValueRecord"]

PathItem = str | int
"""A step in the state tree: a mapping's key or a list index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor of the checkpoint: dtype, global shape and chunks."""

    dtype: str
    """The dtype's safetensors name: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    path: tuple[PathItem, ...]
    same_as: str | None = None
    """The name of the tensor whose storage this one shares."""
    chunks: Sequence[Chunk] = ()
    data: bytes | None = None
    """The whole tensor, little-endian in C order, if it is small."""

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRecord:
    """A leaf that is not a tensor."""

    path: tuple[PathItem, ...]
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRank:
    """The values of each rank, and the policy for a load with another world size."""

    policy: Literal["reseed", "require", "drop"]
    ranks: tuple[Any, ...]
