"""Digests of small plain tensors, by which pipeline stages agree on tensors that several of them hold."""

from collections.abc import Sequence

import torch

from hocket.ckpt.torch.layout import TensorInfo
from hocket.native import _native

__all__ = ["COMPARED_BYTES", "digests_of"]

COMPARED_BYTES = 1 << 20
"""Several stages may hold a plain tensor of at most this many bytes, if its bytes are equal."""


def digests_of(infos: Sequence[TensorInfo]) -> dict[str, str]:
    """Return digests of the bytes of small plain tensors, which other stages may hold as well."""
    digests = {}
    for info in infos:
        if info.is_plain and info.local.nbytes <= COMPARED_BYTES:
            data = info.local.cpu().contiguous().reshape(-1).view(torch.uint8)
            digests[info.name] = _native.xxh3_128(data.numpy().tobytes()).hex()
    return digests
