"""The interface of an order of samples, and the implementation of the native order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.cursor import WHOLE, Cursor, OrderSettings
from hocket.stream.engine import Engine, digest
from hocket.stream.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """An iteration over an epoch, or over the rest of it from some batch on."""

    order: _native.EpochOrder
    """The samples of each batch. Batch 0 of this order is batch `start` of the epoch."""

    start: int = 0
    """Number in the epoch of the order's first batch."""

    rank: int
    """The rank to read as. An order that holds the batches of one rank only is read as rank 0 of 1."""

    world_size: int
    """Number of ranks that divide the order's batches."""

    following: _native.EpochOrder | None = None
    """The order of the next epoch, for prefetching; None if it is costly to compute."""

    shares: NDArray[np.int64] | None = None
    """`(batches, 2)`: samples that count on this rank and over all ranks, if the order does not hold them."""


class Plan(Protocol):
    """An order of samples for given data and a given rank."""

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
        ...

    def num_local_samples(self, epoch: int) -> int:
        """Return the number of samples that this rank yields in a whole epoch."""
        ...

    def passes(self, epoch: int, start: int) -> Pass:
        """Return the iteration over an epoch from batch `start` on."""
        ...

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of a global batch, in order, as numbers in storage order."""
        ...

    def notices(self) -> list[tuple[int, str]]:
        """Return log messages about the end of an epoch, each with its level."""
        ...

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the position of `cursor` as JSON values."""
        ...

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor` to the position in `state`."""
        ...


class NativePlan:
    """The native order, which does not depend on the number of ranks and workers."""

    def __init__(self, engine: Engine, settings: OrderSettings, data_parallel: tuple[int, int]) -> None:
        self.settings = settings
        self._engine = engine
        self._rank, self._world_size = data_parallel
        first = self._order(0)
        self._num_batches = first.num_batches
        self._num_local_samples = first.num_local_samples(*data_parallel)
        self.num_dropped = first.num_dropped
        """Number of samples that an epoch leaves out."""
        self.num_repeated = first.num_repeated
        """Number of samples that an epoch repeats to fill the last batch."""
        if self._num_batches == 0:
            raise ConfigError(
                f"`tail='{settings.tail}'` leaves no batch of {settings.epoch_size} samples in batches of "
                f"{settings.global_batch_size}: make the batch smaller, or use `tail='short'`"
            )

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch; all epochs have the same number."""
        return self._num_batches

    def num_local_samples(self, epoch: int) -> int:
        """Return the number of samples that this rank yields in an epoch."""
        return self._num_local_samples

    def passes(self, epoch: int, start: int) -> Pass:
        """Return the iteration over an epoch; see `Plan`. The order does not depend on `start`."""
        return Pass(
            order=self._order(epoch),
            following=self._order(epoch + 1),
            rank=self._rank,
            world_size=self._world_size,
        )

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of a global batch; see `Plan`."""
        return self._order(epoch).sample_ids(batch)

    def notices(self) -> list[tuple[int, str]]:
        """Return log messages about samples left out, repeated, or in a short last batch."""
        settings = self.settings
        configuration = f"`tail='{settings.tail}'`"
        messages = []
        if self.num_dropped:
            if settings.batching_method == "stratified":
                configuration += ", `batching_method='stratified'`"
            dropped = f"{self.num_dropped} of {settings.epoch_size} samples are left out in each epoch"
            messages.append((logging.WARNING, f"{dropped} ({configuration})"))
        if self.num_repeated:
            messages.append(
                (logging.WARNING, f"{self.num_repeated} samples of each epoch are repeated ({configuration})")
            )
        rest = (settings.epoch_size - self.num_dropped) % settings.global_batch_size
        if settings.tail == "short" and rest and settings.batching_method != "per_stream":
            short = f"the last batch of each epoch has {rest} samples instead of {settings.global_batch_size}"
            messages.append((logging.INFO, f"{short} ({configuration})"))
        return messages

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of `cursor`; see `Cursor.state`."""
        return cursor.state(self.settings)

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor`; see `Cursor.load`."""
        cursor.load(state, self.settings, num_batches=self._num_batches)

    def _order(self, epoch: int) -> _native.EpochOrder:
        return self.settings.order(self._engine.mix, epoch)


def describe_mixture(engine: Engine) -> str:
    """Return the `mixture` of a state: `whole`, or a digest of the number of samples per stream."""
    return WHOLE if engine.counts == engine.sizes else digest(engine.counts)
