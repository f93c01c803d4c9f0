"""The exchange of facts about batches between the ranks, one step ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from hocket.trainer.ranks.rank_gather import RankReducer, all_ranks, gather_async
from hocket.trainer.ranks.rank_sockets import RankSockets, connect_ranks


class CountedBatch(Protocol):
    """The counts of a rank's batch that the ranks exchange."""

    samples: int
    counted: int
    tokens: int
    weight: float
    global_step: Any


@dataclass(slots=True)
class GlobalStep:
    """The facts about one global batch, summed over the ranks."""

    is_end: bool
    """Whether a rank has no batch, which ends the epoch on every rank."""
    should_stop: bool
    samples: int
    """Samples of the global batch."""
    tokens: int
    weight: float
    """N, the summed loss weight of the global batch."""
    most_samples: int
    """Rows of the largest batch of any rank, which set the number of microbatches on every rank."""
    clock_s: float | None
    """Rank 0's clock as the exchange began, so that all ranks count the same time; None with one rank."""
    failed_ranks: tuple[int, ...] = ()
    """The ranks that could not fetch their batch."""
    ended_ranks: tuple[int, ...] = ()
    """The ranks whose data ended, in a job of several ranks."""

    def wait(self) -> GlobalStep:
        """Return this object, so that a finished exchange can be used as a `PendingStep`."""
        return self


class StepSync:
    """The exchange of facts about batches between the ranks, once per batch and without blocking.

    After `connect`, a few ranks on one host use sockets. Otherwise the exchange is one asynchronous
    all-reduce (see `rank_gather`). A job of one process exchanges nothing.

    All processes take part, also those that share their data with others, as tensor-parallel ranks do. The
    samples of these are counted once.

    Args:
        parallelism: The parallelism, which performs the all-reduce. If its data-parallel ranks are fewer than
            the processes, the construction is collective.

    Attributes:
        rank: This process among all.
        num_ranks: Number of processes.
        num_data_ranks: Number of ranks with data of their own.
    """

    _FIELDS = 6
    """Number of values that a rank sends: samples, tokens, loss weight, stop, rank 0's clock, rows."""

    def __init__(self, parallelism: RankReducer) -> None:
        self._data_ranks = parallelism
        self.data_rank, self.num_data_ranks = parallelism.data_parallel
        self._parallelism = all_ranks(parallelism)
        self.rank, self.num_ranks = self._parallelism.data_parallel
        self.data_rank_of = list(range(self.num_ranks))
        """The data-parallel rank of each process."""
        if self.num_data_ranks < self.num_ranks:
            self.data_rank_of = [int(number) for number in self.gather(self.data_rank)]
        self._is_counted = self.data_rank_of.index(self.data_rank) == self.rank
        self._sockets: RankSockets | None = None

    def connect(self, timeout_s: float) -> None:
        """Connect the ranks by sockets if they are few and on one host. Collective.

        Args:
            timeout_s: Seconds that an exchange may wait for a rank.
        """
        self._sockets = connect_ranks(self, num_numbers=self._FIELDS, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the sockets that `connect` opened."""
        if self._sockets is not None:
            self._sockets.close()

    def begin(
        self,
        batch: CountedBatch | None,
        *,
        wants_stop: bool = False,
        has_failed: bool = False,
        clock_s: float = 0.0,
    ) -> GlobalStep | PendingStep:
        """Start the exchange and return at once. Collective: every rank exchanges its batches in order.

        Args:
            batch: This rank's batch; None at the end of its data, which ends the epoch on every rank.
            wants_stop: Whether this rank requests a stop.
            has_failed: Whether this rank could not fetch the batch; every rank then raises at the same step.
            clock_s: The time that all ranks count for the step in progress; rank 0's holds for all.
        """
        if self.num_ranks == 1:
            return self.of_one(batch, wants_stop, has_failed)
        # The rows of a batch, at least 1; 0 for no batch; -1 for a failure.
        rows = -1 if has_failed else 0 if batch is None else batch.samples
        facts = (
            (0, 0, 0.0, wants_stop, clock_s, rows)
            if batch is None or not self._is_counted
            else (batch.counted, batch.tokens, batch.weight, wants_stop, clock_s, rows)
        )
        if (sockets := self._sockets) is not None:
            return PendingStep(partial(sockets.receive, sockets.send(*facts)))
        return PendingStep(gather_async(facts, self._parallelism).read)

    def of_one(self, batch: CountedBatch | None, wants_stop: bool, has_failed: bool = False) -> GlobalStep:
        """Return the facts about a batch in a job of one process."""
        if batch is None:
            return GlobalStep(True, wants_stop, 0, 0, 0.0, 0, None, (0,) if has_failed else ())
        step: GlobalStep | None = batch.global_step
        if step is None:
            step = GlobalStep(
                False, wants_stop, batch.counted, batch.tokens, batch.weight, batch.samples, None
            )
            batch.global_step = step
        else:
            step.should_stop = wants_stop
        return step

    def sum_of(self, *numbers: float) -> list[float]:
        """Sum numbers over the ranks. Collective and blocking: for setup and saves, not for every step."""
        if self.num_ranks == 1:
            return list(numbers)
        summed: list[float] = (
            self._parallelism.reduce_async(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
            .wait()
            .tolist()
        )
        return summed

    def sum_of_data(self, *numbers: float) -> list[float]:
        """Sum numbers over the ranks with data of their own. Collective and blocking."""
        if self.num_data_ranks == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        summed: list[float] = self._data_ranks.reduce_async(values).wait().tolist()
        return summed

    def gather(self, number: float) -> list[float]:
        """Return every rank's number, on every rank. Collective and blocking."""
        if self.num_ranks == 1:
            return [number]
        return [row[0] for row in gather_async([number], self._parallelism).read()]

    def from_rank_0(self, *numbers: int) -> list[int]:
        """Return rank 0's numbers on every rank, exact below 2**53. Collective and blocking."""
        contribution = numbers if self.rank == 0 else (0,) * len(numbers)
        return [int(number) for number in self.sum_of(*contribution)]

    def text_from_rank_0(self, text: str) -> str:
        """Return rank 0's text on every rank. Collective and blocking."""
        if self.num_ranks == 1:
            return text
        data = text.encode()
        (length,) = self.from_rank_0(len(data))
        codes = list(data) if self.rank == 0 else [0] * length
        return bytes(self.from_rank_0(*codes)).decode() if length else ""


class PendingStep:
    """An exchange that may still be in progress."""

    __slots__ = ("_receive",)

    def __init__(self, receive: Callable[[], Sequence[Sequence[float]]]) -> None:
        self._receive = receive

    def wait(self) -> GlobalStep:
        """Return the facts about the global batch; blocks only if a rank is more than a step late."""
        samples, tokens, weights, stops, clocks, rows = zip(*self._receive(), strict=True)
        is_end = min(rows) <= 0
        return GlobalStep(
            is_end=is_end,
            should_stop=any(stops),
            samples=int(sum(samples)),
            tokens=int(sum(tokens)),
            weight=sum(weights),
            most_samples=int(max(rows)),
            clock_s=clocks[0],
            failed_ranks=tuple(rank for rank, number in enumerate(rows) if number < 0) if is_end else (),
            ended_ranks=tuple(rank for rank, number in enumerate(rows) if not number) if is_end else (),
        )
