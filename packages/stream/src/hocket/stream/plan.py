"""What an iteration asks of an order of samples, and the native order's answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.engine import Engine, digest
from hocket.stream.errors import ConfigError
from hocket.stream.position import WHOLE, Cursor, OrderSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One way through an epoch, from some batch on."""

    order: _native.EpochOrder
    """Which samples each batch holds; its batches are counted from `start`."""

    start: int = 0
    """The number, in the epoch, of the order's first batch."""

    rank: int
    """The rank to read as: the order may be of one rank alone, which is then 0 of 1."""

    world_size: int
    """How many ranks divide the order's batches."""

    following: _native.EpochOrder | None = None
    """The next epoch's order, where it is known at no great cost."""

    shares: NDArray[np.int64] | None = None
    """`(batches, 2)`: samples that count here and over all ranks, where the order does not know them."""


class Plan(Protocol):
    """An order of samples, bound to data and to a rank."""

    def num_batches(self, epoch: int) -> int:
        """Return the batches of an epoch, the same on every rank."""
        ...

    def num_local_samples(self, epoch: int) -> int:
        """Return how many samples this rank yields in a whole epoch."""
        ...

    def passes(self, epoch: int, start: int) -> Pass:
        """Return the way through an epoch from batch `start` on."""
        ...

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return a global batch's samples, in order, by their numbers in storage order."""
        ...

    def notices(self) -> list[tuple[int, str]]:
        """Return what a person may want to know of an epoch's end, each with its level."""
        ...

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return where `cursor` is, as JSON."""
        ...

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor` to where `state` was taken."""
        ...


class NativePlan:
    """The order that no topology changes: `hocket-stream`'s own."""

    def __init__(self, engine: Engine, settings: OrderSettings, data_parallel: tuple[int, int]) -> None:
        self.settings = settings
        self._engine = engine
        self._rank, self._world_size = data_parallel
        first = self._order(0)
        self._num_batches = first.num_batches
        self._num_local_samples = first.num_local_samples(*data_parallel)
        self.num_dropped = first.num_dropped
        """Samples that an epoch leaves out."""
        self.num_repeated = first.num_repeated
        """Samples that an epoch has once more, to fill batches."""
        if self._num_batches == 0:
            raise ConfigError(
                f"`tail='{settings.tail}'` leaves nothing of {settings.epoch_size} samples in batches of "
                f"{settings.global_batch_size}: make the batch smaller, or use `tail='short'`"
            )

    def num_batches(self, epoch: int) -> int:
        """Return the batches of an epoch: each has as many."""
        return self._num_batches

    def num_local_samples(self, epoch: int) -> int:
        """Return how many samples this rank yields in an epoch."""
        return self._num_local_samples

    def passes(self, epoch: int, start: int) -> Pass:
        """Return the epoch's order; where in it one starts makes no difference."""
        return Pass(
            order=self._order(epoch),
            following=self._order(epoch + 1),
            rank=self._rank,
            world_size=self._world_size,
        )

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return a global batch's samples; see `Plan`."""
        return self._order(epoch).sample_ids(batch)

    def notices(self) -> list[tuple[int, str]]:
        """Return what the tail policy and the batching do to an epoch."""
        settings = self.settings
        how = f"`tail='{settings.tail}'`"
        found = []
        if self.num_dropped:
            if settings.batching_method == "stratified":
                how += ", `batching_method='stratified'`"
            left = f"{self.num_dropped} of {settings.epoch_size} samples are left out in each epoch"
            found.append((logging.WARNING, f"{left} ({how})"))
        if self.num_repeated:
            found.append((logging.WARNING, f"{self.num_repeated} samples of each epoch come again ({how})"))
        rest = (settings.epoch_size - self.num_dropped) % settings.global_batch_size
        if settings.tail == "short" and rest and settings.batching_method != "per_stream":
            short = f"the last batch of each epoch has {rest} samples instead of {settings.global_batch_size}"
            found.append((logging.INFO, f"{short} ({how})"))
        return found

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return where `cursor` is; see `Cursor.state`."""
        return cursor.state(self.settings)

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor`; see `Cursor.load`."""
        cursor.load(state, self.settings, num_batches=self._num_batches)

    def _order(self, epoch: int) -> _native.EpochOrder:
        return self.settings.order(self._engine.mix, epoch)


def describe_mixture(engine: Engine) -> str:
    """Return the `mixture` that a state keeps of the streams' counts."""
    return WHOLE if engine.counts == engine.sizes else digest(engine.counts)
