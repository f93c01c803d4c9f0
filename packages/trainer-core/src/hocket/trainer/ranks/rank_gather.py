"""The gathers between ranks: of numbers, as a sum of vectors with each rank's own slots, and of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor

from hocket.trainer.process.world import num_ranks
from hocket.trainer.protocols import Work

T = TypeVar("T")


class RankReducer(Protocol):
    """The part of a `Parallelism` that this module needs."""

    data_parallel: tuple[int, int]

    def reduce_async(self, values: Tensor) -> Work:
        """Start a sum over the data-parallel ranks."""


class AllRanks:
    """All processes of a job, of which several may share their data.

    Args:
        parallelism: The parallelism of a job with fewer data-parallel ranks than processes.
    """

    def __init__(self, parallelism: Any) -> None:
        self.data_parallel: tuple[int, int] = (parallelism.global_rank, parallelism.world_size)
        self._parallelism = parallelism

    def reduce_async(self, values: Tensor) -> Work:
        """Start a sum over all processes."""
        work: Work = self._parallelism.reduce_all_async(values)
        return work


def all_ranks(parallelism: RankReducer) -> RankReducer:
    """Return the exchange between all processes, which is that of the data-parallel ranks in most jobs."""
    size = parallelism.data_parallel[1]
    return AllRanks(parallelism) if getattr(parallelism, "world_size", size) > size else parallelism


class GatheredRows:
    """One row of numbers of each rank, whose exchange may still be in progress."""

    __slots__ = ("_size", "_work")

    def __init__(self, work: Work, size: int) -> None:
        self._work = work
        self._size = size

    def wait(self) -> Tensor:
        """Return the rows `(ranks, numbers)`, where the values were; blocks only while a rank is late."""
        return self._work.wait().reshape(self._size, -1)

    def read(self) -> list[list[float]]:
        """Return the rows as Python numbers; also waits for the device."""
        rows: list[list[float]] = self.wait().tolist()
        return rows


def gather_async(values: Sequence[float] | Tensor, parallelism: RankReducer) -> GatheredRows:
    """Start to gather as many numbers from each rank, and return at once. Collective.

    Args:
        values: This rank's numbers: plain ones, exact as float64, or a tensor `(n,)` that the ranks can sum.
        parallelism: The parallelism, which performs the sum.
    """
    rank, size = parallelism.data_parallel
    length = len(values)
    if isinstance(values, Tensor):
        return GatheredRows(sum_slots(values, parallelism, start=rank * length, total=size * length), size)
    vector = [0.0] * (size * length)
    vector[rank * length : (rank + 1) * length] = values
    return GatheredRows(
        parallelism.reduce_async(torch.tensor(vector, dtype=torch.float64, device="cpu")), size
    )


def sum_slots(values: Tensor, parallelism: RankReducer, *, start: int, total: int) -> Work:
    """Start the sum of `total` slots, of which this rank fills those from `start` on. Collective.

    Args:
        values: This rank's numbers `(n,)`; the ranks may have different numbers of them.
        parallelism: The parallelism, which performs the sum.
        start: The first slot of this rank; no other rank has its slots.
        total: The number of slots of all ranks.
    """
    slots = values.new_zeros(total)
    slots[start : start + len(values)] = values
    return parallelism.reduce_async(slots)


def gather_objects(value: T, group: Any = None) -> list[T]:
    """Return the value of each rank, in order. Collective and blocking.

    Args:
        value: This rank's value, which is pickled; numbers of each step go through `gather_async`.
        group: The process group of the ranks, if not all ranks of the job.
    """
    size = num_ranks() if group is None else torch.distributed.get_world_size(group)
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered
