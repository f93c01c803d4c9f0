"""A rank's own values: in the manifest if they are small, else as the bytes of a tensor in its data file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hocket.ckpt.document.planning import Box, WrittenPart
from hocket.ckpt.document.records import RANK_VALUES_NODE, is_rank_values
from hocket.ckpt.document.values import canonical, from_canonical
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.torch.saving.plan import MemoryRange

if TYPE_CHECKING:
    from hocket.ckpt.document.manifest import Manifest
    from hocket.ckpt.read.reader import Checkpoint

__all__ = ["IN_MANIFEST_BYTES", "read_rank_values", "spill"]

IN_MANIFEST_BYTES = 64 << 10
"""The most bytes of a rank's own values that are kept in the manifest, which every rank reads."""


def spill(text: bytes, rank: int) -> tuple[bytes, MemoryRange, torch.Tensor]:
    """Return the manifest's reference to values, the entry of the data file that has them, and its memory.

    Args:
        text: The values as canonical JSON.
        rank: The rank.
    """
    name = f"{RANK_VALUES_NODE}.{rank}"
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    entry = MemoryRange(WrittenPart(name, Box((0,), (len(text),))), "U8", data.data_ptr(), len(text))
    return canonical({"stored_in": name}, "per_rank"), entry, data


def read_rank_values(
    checkpoint: Checkpoint, manifest: Manifest, rank: int, world_size: int
) -> dict[str, Any] | None:
    """Return a rank's own values; None if there are none, or if as many ranks as here did not save them.

    Raises:
        CheckpointIncompatibleError: The checkpoint requires as many ranks.
        CheckpointError: The data file that has them cannot be read.
    """
    per_rank = manifest.per_rank
    if per_rank is None:
        return None
    if len(per_rank.ranks) == world_size:
        values: Any = per_rank.ranks[rank]
        name = values.get("stored_in") if isinstance(values, dict) and len(values) == 1 else None
        if isinstance(name, str) and is_rank_values(name) and name in manifest.tensors:
            values = from_canonical(checkpoint[name].tobytes())
        return values  # type: ignore[no-any-return]
    if per_rank.policy == "require":
        raise CheckpointIncompatibleError(
            f"`{checkpoint.uri}` was saved by {len(per_rank.ranks)} ranks and requires as many, for its "
            f"`per_rank` values; here are {world_size}. Save with `per_rank_policy='reseed'` or 'drop' to be "
            "free of that"
        )
    return None
