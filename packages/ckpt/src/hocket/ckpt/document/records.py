"""The records of tensors and values in a checkpoint's document, of any format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hocket.ckpt.document.chunks import Chunk, ChunkColumns
from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.document.values import decode_value
from hocket.native import _native

__all__ = [
    "RANK_VALUES_NODE",
    "DeltaBase",
    "PathItem",
    "PerRank",
    "TensorRecord",
    "ThinnedState",
    "ValueRecord",
    "is_rank_values",
    "state_names",
]

RANK_VALUES_NODE = _native.CKPT_RANK_VALUES_NODE
"""The node of the tensors that hold values of single ranks; they are no part of the state tree."""

PathItem = str | int
"""A step in the state tree: a mapping's key or a list index."""

if TYPE_CHECKING:
    _TensorFields = tuple[
        str, tuple[int, ...], tuple[PathItem, ...], str | None, _native.ChunkColumns | None, bytes | None
    ]


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

    @classmethod
    def by_name(cls, raw: Mapping[str, _TensorFields]) -> dict[str, TensorRecord]:
        """Build the records of the `tensors` that `_native.Checkpoint.take_contents` returns."""
        return {
            name: cls(
                dtype=dtype,
                shape=shape,
                path=path,
                same_as=same_as,
                chunks=() if columns is None else ChunkColumns(columns),
                data=data,
            )
            for name, (dtype, shape, path, same_as, columns, data) in raw.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRecord:
    """A leaf that is not a tensor."""

    path: tuple[PathItem, ...]
    value: Any

    @classmethod
    def by_name(cls, raw: Mapping[str, tuple[tuple[PathItem, ...], Any]]) -> dict[str, ValueRecord]:
        """Build the records of the `values` that `_native.Checkpoint.take_contents` returns.

        Raises:
            ValueError: A tagged value is invalid.
        """
        return {name: cls(path=path, value=decode_value(value)) for name, (path, value) in raw.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRank:
    """The values of each rank, and the policy for a load with another world size."""

    policy: Literal["reseed", "require", "drop"]
    ranks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The checkpoint that a delta's tensors are stored as a difference from."""

    base: str
    """Its name in the folder that holds the delta too."""
    save_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinnedState:
    """The part of a saved state that was dropped later."""

    save_id: str
    """The id of the save before it was dropped."""
    dropped: tuple[str, ...]
    """Globs of the names that were dropped."""
    num_tensors: int
    num_bytes: int


def is_rank_values(name: str) -> bool:
    """Return whether a tensor of a data file holds a rank's own values."""
    return name.startswith(f"{RANK_VALUES_NODE}.")


def state_names(names: Iterable[str]) -> list[str]:
    """Return the names of the tensors of the state tree, of those in data files."""
    return [name for name in names if not is_rank_values(name)]
