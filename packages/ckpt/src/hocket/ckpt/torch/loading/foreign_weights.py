"""A reader that loads tensors of checkpoints of other programs into the tensors of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.document.tree import TreeLeaf
from hocket.ckpt.formats.table import FORMATS
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.torch.layout import describe, torch_dtype

__all__ = ["ForeignWeights", "open_foreign_weights"]


class ForeignWeights:
    """The tensors of a checkpoint of another program, by name.

    Args:
        source: The open checkpoint.

    Attributes:
        format: The format in words.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.format: str = FORMATS[source.format].title

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def record(self, name: str) -> TensorRecord:
        """Return a tensor's dtype and global shape."""
        return self._source.record(name)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read tensors, each in place, and convert them to the dtypes of those that they fill.

        Each rank reads the parts that it holds. Not collective.

        Args:
            tensors: Tensors and DTensors by their names in the checkpoint, with the same global shapes.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
        leaves = {name: TreeLeaf(name, (name,), tensor) for name, tensor in tensors.items()}
        for info in describe(leaves, rank=rank, world_size=world_size):
            if info.box is None:
                continue
            array = self._source.part(info.name, info.box)
            dtype = torch_dtype(self._source.record(info.name).dtype, info.name)
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            flat = torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8, device="cpu")
            info.local.copy_(flat.view(dtype).reshape(info.box.size))


def open_foreign_weights(source: str | os.PathLike[str]) -> ForeignWeights | None:
    """Open a checkpoint of another program.

    Args:
        source: A distributed checkpoint of torch, a file of `torch.save`, or safetensors.

    Returns:
        The checkpoint's tensors; None for a checkpoint of Hocket.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        CheckpointUnsafeError: A pickle in it refers to anything but data.
    """
    checkpoint = open_checkpoint(source)
    return None if checkpoint.has_manifest else ForeignWeights(checkpoint)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
