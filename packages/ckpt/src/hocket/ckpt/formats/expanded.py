"""Limit on expanded tensors, whose items share storage and which grow when they are read."""

import math
from collections.abc import Sequence

from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.errors import CheckpointIncompatibleError

__all__ = ["check_expansion", "repeated_dims"]

_SMALL_BYTES = 64 << 20
_MAX_RATIO = 16


def check_expansion(uri: str, name: str, dtype: str, size: Sequence[int], strides: Sequence[int]) -> None:
    """Raise if a chunk is far larger in memory than in its file.

    With a stride of 0, which `Tensor.expand` produces, a file of a kilobyte can describe a tensor of
    terabytes. A chunk is allowed if it has at most 64 MiB, or at most 16 times the bytes that its strides
    reach.

    Args:
        uri: The checkpoint, for the error message.
        name: The tensor, for the error message.
        dtype: Its dtype, by safetensors name.
        size: The shape of the chunk.
        strides: The strides of the located chunk, in items.

    Raises:
        CheckpointIncompatibleError: The chunk is larger than allowed.
    """
    num_bytes = math.prod(size) * ITEM_BYTES[dtype]
    stored_items = 1 + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    stored_bytes = stored_items * ITEM_BYTES[dtype]
    if num_bytes > max(_SMALL_BYTES, _MAX_RATIO * stored_bytes):
        raise CheckpointIncompatibleError(
            f"`{uri}`: tensor `{name}` of shape {list(size)} is an expanded view: {stored_bytes} bytes "
            f"are stored, {num_bytes} are described. Pass `allow_expand=True` (`--allow-expand`) to write or "
            "read all of them, or leave the tensor out (`--exclude`)"
        )


def repeated_dims(size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims along which a chunk repeats the same items, because their stride is 0."""
    return tuple(dim for dim, stride in enumerate(strides) if stride == 0 and size[dim] > 1)
