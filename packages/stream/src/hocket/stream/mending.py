"""What stands in for a sample that cannot be decoded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hocket.stream.errors import SampleCorruptError

logger = logging.getLogger("hocket.stream")

#: A stream with so many bad samples in a row has another trouble than a bad sample.
_MOST_TRIES = 64

Batch = TypeVar("Batch")


class StandIns(Generic[Batch]):
    """For each bad sample the next good one of its stream, in storage order, round to its beginning.

    So what stands in follows from the data alone, and is the same on any rank, worker and machine.

    Args:
        look_up: Reads and decodes samples by number.
        sizes: Samples of each stream; they are numbered one stream after the other.
    """

    def __init__(self, look_up: Callable[[Sequence[int]], Batch], sizes: Sequence[int]) -> None:
        self._look_up = look_up
        self._ends = list(itertools.accumulate(sizes))
        self._known: dict[int, int] = {}
        self.num_replaced = 0
        """Samples of batches in whose place another stood."""

    def read(self, numbers: Sequence[int]) -> Batch:
        """Read samples by number, with good ones in place of bad ones.

        Raises:
            SampleCorruptError: A bad sample is followed by too many others.
        """
        good = [self._find(number) for number in numbers]
        batch = self._look_up(good)
        self.num_replaced += sum(one != other for one, other in zip(numbers, good, strict=True))
        return batch

    def _find(self, number: int) -> int:
        if number in self._known:
            return self._known[number]
        end = next(end for end in self._ends if number < end)
        first = max((before for before in self._ends if before <= number), default=0)
        reason = None
        for step in range(min(end - first, _MOST_TRIES)):
            candidate = first + (number - first + step) % (end - first)
            try:
                self._look_up([candidate])
            except SampleCorruptError as error:
                reason = reason or error
                continue
            if reason is not None:
                logger.warning("%s; sample %d stands in for sample %d", reason, candidate, number)
                self._known[number] = candidate
            return candidate
        raise reason or AssertionError(f"sample {number} is of no stream")
