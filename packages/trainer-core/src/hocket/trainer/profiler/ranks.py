"""Collective parts of profiling: gathering figures and comparing clocks."""

from __future__ import annotations

import socket
import statistics
import time
from typing import TypeVar

import torch

from hocket.trainer.log.logger import num_ranks

T = TypeVar("T")
_CLOCK_SAMPLES = 5


def is_distributed() -> bool:
    """Return whether there are several ranks with a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and num_ranks() > 1


def gather(value: T) -> list[T]:
    """Return the value of each rank, in order. Collective and blocking; without other ranks, `[value]`."""
    if not is_distributed():
        return [value]
    gathered: list[T | None] = [None] * num_ranks()
    torch.distributed.all_gather_object(gathered, value)
    return [one for one in gathered if one is not None]


def clock_offset_ns() -> int:
    """Return this host's clock minus rank 0's, in nanoseconds. Collective and blocking.

    The offset is 0 on rank 0's own host. On another host it is the median difference of the times at which
    barriers end, exact to the time that a barrier takes.
    """
    if not is_distributed():
        return 0
    samples = []
    for _ in range(_CLOCK_SAMPLES):
        torch.distributed.barrier()
        samples.append(time.time_ns())
    hosts_and_times = gather((socket.gethostname(), samples))
    first_host, first = hosts_and_times[0]
    if socket.gethostname() == first_host:
        return 0
    return int(statistics.median(own - other for own, other in zip(samples, first, strict=True)))
