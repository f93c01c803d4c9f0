"""Evaluation with rank 0's buffers, such as the statistics of a batch norm, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hocket.trainer.protocols import Parallelism


@contextlib.contextmanager
def rank_zero_buffers(model: nn.Module, parallelism: Parallelism) -> Iterator[None]:
    """Give every rank the buffers of rank 0, as a checkpoint has them, and restore its own afterwards.

    A training step updates the statistics of a batch norm from each rank's own samples. Collective with
    several ranks.

    Args:
        model: The model, whose saved and unsharded floating-point buffers are replaced.
        parallelism: The parallelism, which sums the buffers of rank 0 and zeros of the other ranks.
    """
    buffers = _buffers(model) if parallelism.data_parallel[1] > 1 else []
    own_values = [buffer.clone() for buffer in buffers]
    if buffers:
        # Either dtype holds the buffers exactly; on a CPU, `reduce_async` takes float64.
        is_wide = buffers[0].device.type == "cpu" or any(one.dtype is torch.float64 for one in buffers)
        flat = torch.cat([one.flatten().to(torch.float64 if is_wide else torch.float32) for one in buffers])
        contribution = flat if parallelism.data_parallel[0] == 0 else torch.zeros_like(flat)
        summed = parallelism.reduce_async(contribution).wait()
        parts = torch.split(summed, [one.numel() for one in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.reshape(buffer.shape))
    try:
        yield
    finally:
        for buffer, own_value in zip(buffers, own_values, strict=True):
            buffer.copy_(own_value)


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    saved = model.state_dict()
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point() and buffer.numel() and not hasattr(buffer, "to_local")
    ]
