"""A digest of a tensor's bits, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**20


def digest(tensor: Tensor) -> int:
    """Return a digest that, barring collisions, changes with any bit and with the order of the elements."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = 4 if len(raw) % 4 == 0 else 1
    words = raw.view(torch.int32) if width == 4 else raw
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = torch.arange(1, 2 * _CHUNK_ELEMENTS, 2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK_ELEMENTS):
        part = words[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        # The int64 sums wrap around; a product with an odd factor loses no bit.
        total = total * 1_000_003 + (part * factors[: len(part)]).sum()
    return int(total)
