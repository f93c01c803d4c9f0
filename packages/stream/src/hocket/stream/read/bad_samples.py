"""Replacement of samples that cannot be decoded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hocket.stream.errors import SampleCorruptError

logger = logging.getLogger("hocket.stream")

#: A stream with this many consecutive bad samples has another problem.
_MAX_ATTEMPTS = 64

Batch = TypeVar("Batch")


class SampleReplacer(Generic[Batch]):
    """A reader that replaces a bad sample by the next good one of its stream, cyclically in storage order.

    The replacement depends on the data alone, so it is the same on all ranks, workers and machines.

    Args:
        look_up: Function that reads and decodes samples by number.
        sizes: Number of samples in each stream; samples are numbered one stream after the other.
    """

    def __init__(self, look_up: Callable[[Sequence[int]], Batch], sizes: Sequence[int]) -> None:
        self._look_up = look_up
        self._ends = list(itertools.accumulate(sizes))
        self._known: dict[int, int] = {}
        self.num_replaced = 0
        """Number of samples that were replaced."""

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return samples by number, with bad ones replaced.

        Raises:
            SampleCorruptError: Too many consecutive samples are bad.
        """
        good_numbers = [self._find(number) for number in numbers]
        batch = self._look_up(good_numbers)
        self.num_replaced += sum(one != other for one, other in zip(numbers, good_numbers, strict=True))
        return batch

    def _find(self, number: int) -> int:
        if number in self._known:
            return self._known[number]
        end = next(end for end in self._ends if number < end)
        first = max((before for before in self._ends if before <= number), default=0)
        reason = None
        for step in range(min(end - first, _MAX_ATTEMPTS)):
            candidate = first + (number - first + step) % (end - first)
            try:
                self._look_up([candidate])
            except SampleCorruptError as error:
                reason = reason or error
                continue
            if reason is not None:
                logger.warning("%s; sample %d stands in for sample %d", str(reason), candidate, number)
                self._known[number] = candidate
            return candidate
        raise reason or AssertionError(f"sample {number} belongs to no stream")
