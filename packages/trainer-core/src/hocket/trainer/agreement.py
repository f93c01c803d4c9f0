"""The one small thing that ranks tell each other each step, a step ahead, so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hocket.trainer.protocols import Parallelism, Work


class Said(NamedTuple):
    """What this rank has to say of the batch that it fetched."""

    has_batch: bool
    """False when its data came to the end of the epoch."""
    samples: int
    """Rows of its batch, those without a share included."""
    samples_counted: int
    """Rows with a share in the global batch."""
    tokens: int
    weight: float
    """What its samples weigh in the loss, together."""
    wants_stop: bool


@dataclass(slots=True)
class Agreed:
    """What all ranks together said of a batch."""

    is_end: bool
    """Some rank has no batch: the epoch ends for all of them."""
    should_stop: bool
    samples: int
    """Samples of the global batch."""
    tokens: int
    weight: float
    """N: what they weigh in the loss, all together."""
    most_samples: int
    """The rows of the largest batch of a rank; it decides how many microbatches each rank makes."""
    clock_s: float | None
    """Rank 0's clock when it fetched the batch, so that every rank counts the same time; None when alone."""

    def wait(self) -> Agreed:
        """Itself: what is agreed needs no waiting for."""
        return self


class Agreement:
    """Tells ranks of each other's batches with one asynchronous reduction for each batch.

    Every rank fills its own place in a vector of zeros, and the sum is everybody's: a gather made of a sum,
    so that it also gives the largest batch. In a job of one process there is no vector and no reduction.

    Args:
        parallelism: Reduces.
    """

    _FIELDS = 5

    def __init__(self, parallelism: Parallelism) -> None:
        self._parallelism = parallelism
        self._rank, self._size = parallelism.data_parallel

    def begin(self, said: Said, *, clock_s: float) -> Agreed | PendingAgreement:
        """Tell the others; returns at once. Collective: all ranks tell of their batches in the same order.

        Args:
            said: Of this rank's batch.
            clock_s: This rank's clock; rank 0's holds.
        """
        if self._size == 1:
            return Agreed(
                is_end=not said.has_batch,
                should_stop=said.wants_stop,
                samples=said.samples_counted,
                tokens=said.tokens,
                weight=said.weight,
                most_samples=said.samples,
                clock_s=None,
            )
        vector = [0.0] * (self._FIELDS + self._size)
        vector[: self._FIELDS] = (
            said.samples_counted,
            said.tokens,
            said.weight,
            said.wants_stop,
            clock_s if self._rank == 0 else 0.0,
        )
        # 0 rows say that there is no batch: every batch has at least one.
        vector[self._FIELDS + self._rank] = float(said.samples) if said.has_batch else 0.0
        return PendingAgreement(
            work=self._parallelism.reduce_async(torch.tensor(vector, dtype=torch.float64))
        )

    def sum_of(self, *numbers: float) -> list[float]:
        """Sum numbers over the ranks, and wait: for the start of a run, not for its steps. Collective."""
        if self._size == 1:
            return list(numbers)
        summed: list[float] = (
            self._parallelism.reduce_async(torch.tensor(numbers, dtype=torch.float64)).wait().tolist()
        )
        return summed

    def gather(self, number: float) -> list[float]:
        """Every rank's number, on every rank. Waits. Collective."""
        numbers = [0.0] * self._size
        numbers[self._rank] = number
        return self.sum_of(*numbers)

    def from_rank_0(self, *numbers: int) -> list[int]:
        """Rank 0's numbers, exact below 2**53, on every rank. Waits. Collective."""
        mine = numbers if self._rank == 0 else (0,) * len(numbers)
        return [int(number) for number in self.sum_of(*mine)]


class PendingAgreement:
    """An agreement that may still be under way."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> Agreed:
        """What was agreed; there already unless a rank is more than a step late."""
        vector = self._work.wait().tolist()
        samples, tokens, weight, stops, clock_s = vector[: Agreement._FIELDS]
        rows = vector[Agreement._FIELDS :]
        return Agreed(
            is_end=min(rows) == 0.0,
            should_stop=stops > 0,
            samples=int(samples),
            tokens=int(tokens),
            weight=weight,
            most_samples=int(max(rows)),
            clock_s=clock_s,
        )
