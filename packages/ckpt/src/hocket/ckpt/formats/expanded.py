"""Limit on expanded tensors, whose items share storage and which grow when they are read."""

import math

from hocket.ckpt.chunks import ForeignChunk
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.manifest import ITEM_BYTES

__all__ = ["check_expansion"]

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
    if chunk.strides is None or num_bytes <= _SMALL_BYTES:
        return
    last = sum((extent - 1) * stride for extent, stride in zip(chunk.size, chunk.strides, strict=True))
    stored_bytes = (last + 1) * ITEM_BYTES[dtype]
    if num_bytes > _MAX_RATIO * stored_bytes:
        raise CheckpointIncompatibleError(
            f"`{uri}`: tensor `{name}` of shape {list(chunk.size)} is an expanded view: {stored_bytes} bytes "
            f"are stored, {num_bytes} are described. Pass `allow_expand=True` (`--allow-expand`) to write or "
            "read all of them, or leave the tensor out (`--exclude`)."
        )
