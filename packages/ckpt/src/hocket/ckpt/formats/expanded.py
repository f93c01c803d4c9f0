"""Limit on expanded tensors, whose items share storage and which grow when they are read."""

import math
from collections.abc import Sequence
from dataclasses import replace

from hocket.ckpt.document.chunks import ForeignChunk
from hocket.ckpt.document.manifest import ITEM_BYTES
from hocket.ckpt.errors import CheckpointIncompatibleError

__all__ = ["check_expansion", "repeated_dims", "without_repeats"]

_SMALL_BYTES = 64 << 20
_MAX_RATIO = 16


def check_expansion(uri: str, name: str, dtype: str, chunk: ForeignChunk) -> None:
    """Raise if a chunk is far larger in memory than in its file.

    With a stride of 0, which `Tensor.expand` produces, a file of a kilobyte can describe a tensor of
    terabytes. A chunk is allowed if it has at most 64 MiB, or at most 16 times the bytes that its strides
    reach.

    Args:
        uri: The checkpoint, for the error message.
        name: The tensor, for the error message.
        dtype: Its dtype, by safetensors name.
        chunk: The located chunk; the strides of a chunk in a zip are known only then.

    Raises:
        CheckpointIncompatibleError: The chunk is larger than allowed.
    """
    num_bytes = math.prod(chunk.size) * ITEM_BYTES[dtype]
    stored_bytes = _stored_items(chunk) * ITEM_BYTES[dtype]
    if num_bytes > max(_SMALL_BYTES, _MAX_RATIO * stored_bytes):
        raise CheckpointIncompatibleError(
            f"`{uri}`: tensor `{name}` of shape {list(chunk.size)} is an expanded view: {stored_bytes} bytes "
            f"are stored, {num_bytes} are described. Pass `allow_expand=True` (`--allow-expand`) to write or "
            "read all of them, or leave the tensor out (`--exclude`)."
        )


def repeated_dims(chunk: ForeignChunk) -> tuple[int, ...]:
    """Return the dims along which a chunk repeats the same items, because their stride is 0."""
    if chunk.strides is None:
        return ()
    strides = enumerate(chunk.strides)
    return tuple(dim for dim, stride in strides if stride == 0 and chunk.size[dim] > 1)


def without_repeats(chunk: ForeignChunk, dims: Sequence[int]) -> ForeignChunk:
    """Return a chunk with one item along the dims that repeat the same items."""
    if not dims:
        return chunk
    return replace(chunk, size=tuple(1 if dim in dims else n for dim, n in enumerate(chunk.size)))


def _stored_items(chunk: ForeignChunk) -> int:
    if chunk.strides is None:
        return math.prod(chunk.size)
    return 1 + sum((extent - 1) * stride for extent, stride in zip(chunk.size, chunk.strides, strict=True))
