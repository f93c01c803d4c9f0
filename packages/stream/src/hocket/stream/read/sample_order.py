"""The interface of an order of samples, and the implementations of the native order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.read.cursor import WHOLE, Cursor, OrderSettings, check_keys
from hocket.stream.read.dataset_reader import DatasetReader, RankBatch, digest
from hocket.stream.settings.mix_schedule import BatchStarts, MixSchedule
from hocket.stream.settings.validation import whole

logger = logging.getLogger("hocket.stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPass:
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

    def read(self, reader: DatasetReader, *, first: int, stride: int, with_ids: bool) -> Iterator[RankBatch]:
        """Yield the rank's part of batches `first`, `first + stride`, … of the epoch.

        Args:
            reader: The reader of the data.
            first: Number of the first batch in the epoch.
            stride: Distance between two batches.
            with_ids: Whether batches carry the numbers of their samples.
        """
        batches = reader.read(
            self.order,
            rank=self.rank,
            world_size=self.world_size,
            first=first - self.start,
            stride=stride,
            following=self.following,
        )
        for batch in batches:
            local, total = batch.local, batch.total
            if self.shares is not None:
                local, total = self.shares[batch.number].tolist()
            ids = self.order.rank_ids(batch.number, self.rank, self.world_size) if with_ids else None
            yield RankBatch(batch.number + self.start, local, total, batch.columns, ids)


class SampleOrder(Protocol):
    """An order of samples for given data and a given rank."""

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
        ...

    def num_local_samples(self, epoch: int) -> int:
        """Return the number of samples that this rank yields in a whole epoch."""
        ...

    def passes(self, epoch: int, start: int) -> EpochPass:
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


#: The value of `mixture` in a state of an order whose weights change.
WEIGHTED = "weighted"
#: Settings that follow from the batch size.
_OF_BATCHES = ("global_batch_size", "num_canonical_nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class _EpochRest:
    """The rest of an epoch that was begun with another batch size."""

    settings: OrderSettings
    """The order of the epoch."""

    epoch: int

    batch: int
    """Number of batches of the epoch before the rest."""

    sample: int
    """Number of samples of the epoch's order before the rest."""


class NativeSampleOrder:
    """The native order, which does not depend on the number of ranks and workers.

    An epoch that was begun with another batch size keeps its order, and its rest is cut into batches of the
    present size.
    """

    def __init__(
        self, reader: DatasetReader, settings: OrderSettings, data_parallel: tuple[int, int]
    ) -> None:
        self.settings = settings
        self._reader = reader
        self._rest: _EpochRest | None = None
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
        """Return the number of batches in an epoch; see `SampleOrder`."""
        rest = self._rest
        if rest is None or epoch != rest.epoch:
            return self._num_batches
        num_samples, size = self.settings.epoch_size - rest.sample, self.settings.global_batch_size
        return rest.batch + (num_samples // size if self.settings.tail == "drop" else -(-num_samples // size))

    def num_local_samples(self, epoch: int) -> int:
        """Return the number of samples that this rank yields in an epoch."""
        return self._num_local_samples

    def passes(self, epoch: int, start: int) -> EpochPass:
        """Return the iteration over an epoch; see `SampleOrder`."""
        order, number = self._order_from(epoch, start)
        return EpochPass(
            order=order,
            start=number,
            following=self._order(epoch + 1),
            rank=self._rank,
            world_size=self._world_size,
        )

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of a global batch; see `SampleOrder`."""
        order, number = self._order_from(epoch, batch)
        return order.sample_ids(batch - number)

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
        """Return the state of `cursor`; see `Cursor.state`.

        In the rest of an epoch that was begun with another batch size, the settings are those of the epoch,
        and `sample` is the number of samples before the position.
        """
        rest = self._rest
        if rest is None or cursor.epoch != rest.epoch or cursor.batch < rest.batch:
            return cursor.state(self.settings)
        sample = rest.sample + (cursor.batch - rest.batch) * self.settings.global_batch_size
        return cursor.state(rest.settings) | {"sample": min(sample, self.settings.epoch_size)}

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor`; see `Cursor.load`. The state may have another batch size.

        Raises:
            StateMismatchError: It was saved with other data or another order.
            ConfigError: It is not a state of `hocket.stream`.
        """
        if isinstance(state, Mapping) and "weights" in state:
            raise StateMismatchError(
                "the state has `weights`, and this data set has none: give those of the saved run, or start "
                "without this state"
            )
        check_keys(state)
        is_resized = "sample" in state or state["global_batch_size"] != self.settings.global_batch_size
        # Batches that are made of several streams depend on the batch size as a whole.
        if not is_resized or self.settings.batching_method != "random":
            cursor.load(state, self.settings, num_batches=self._num_batches)
            self._rest = None
            return
        self.settings.check(state, ignore=_OF_BATCHES)
        try:
            epoch, batch = whole("epoch", state["epoch"]), whole("batch", state["batch"])
            sizes = {name: whole(name, state[name], least=1) for name in _OF_BATCHES}
            sample = whole(
                "sample",
                state.get("sample", min(batch * sizes["global_batch_size"], self.settings.epoch_size)),
                most=self.settings.epoch_size,
            )
        except ConfigError as error:
            raise ConfigError(f"the state is not a position in this data set: {error}") from None
        settings = replace(self.settings, **sizes)  # type: ignore[arg-type]  # of both, the type is int
        size = self.settings.global_batch_size
        if sample % size == 0 and size % settings.num_canonical_nodes == 0:
            # After as many samples, the lanes are at the same places with batches of either size.
            settings = replace(settings, global_batch_size=size)
        self._rest = (
            _EpochRest(settings=settings, epoch=epoch, batch=batch, sample=sample) if sample else None
        )
        cursor.go(epoch, batch)

    def _order_from(self, epoch: int, batch: int) -> tuple[_native.EpochOrder, int]:
        """Return an order that holds a batch of an epoch, and the number in the epoch of its first batch."""
        rest, settings = self._rest, self.settings
        if rest is None or epoch != rest.epoch or batch < rest.batch:
            return self._order(epoch), 0
        mix, size = self._reader.mix, settings.global_batch_size
        if rest.settings.global_batch_size == size and rest.sample % size == 0:
            return rest.settings.order(mix, epoch), rest.batch - rest.sample // size
        ids = self._ids(rest)
        num_samples = len(ids) // size * size if settings.tail == "drop" else len(ids)
        edges = np.unique(np.append(np.arange(0, num_samples, size), num_samples)).astype(np.uint64)
        return mix.listed_order(ids[:num_samples].data, edges.data), rest.batch

    def _ids(self, rest: _EpochRest) -> NDArray[np.uint64]:
        """Return the samples of the rest of an epoch; this takes time and memory for each of them."""
        size, tail = rest.settings.global_batch_size, self.settings.tail
        order = replace(rest.settings, tail="short").order(self._reader.mix, rest.epoch)
        first, skipped = divmod(rest.sample, size)
        batches = range(first, order.num_batches)
        ids = [number for batch in batches for number in order.sample_ids(batch)][skipped:]
        if tail == "pad":
            missing = -len(ids) % self.settings.global_batch_size
            batches = range(-(-missing // size))
            ids += [number for batch in batches for number in order.sample_ids(batch)][:missing]
        return np.array(ids, np.uint64)

    def _order(self, epoch: int) -> _native.EpochOrder:
        return self.settings.order(self._reader.mix, epoch)


class MixedSampleOrder(NativeSampleOrder):
    """The native order with a schedule of weights.

    Each stream is read from its first sample to its last in an order of its own, then again in another one.
    Every position of the run, counted over all epochs, takes the next sample of the stream whose turn it is.
    """

    def __init__(
        self,
        reader: DatasetReader,
        settings: OrderSettings,
        data_parallel: tuple[int, int],
        schedule: MixSchedule,
    ) -> None:
        self.schedule = self._given = schedule
        super().__init__(reader, settings, data_parallel)

    def position(self, epoch: int, batch: int) -> int:
        """Return the number of samples of the run before a batch."""
        used = self.settings.epoch_size - self.num_dropped
        return epoch * used + min(batch * self.settings.global_batch_size, used)

    @property
    def batch_starts(self) -> BatchStarts:
        """The first samples of batches."""
        settings = self.settings
        return BatchStarts(
            epoch_size=settings.epoch_size,
            global_batch_size=settings.global_batch_size,
            tail=settings.tail,
        )

    def follow(self, schedule: MixSchedule, *, is_resized: bool) -> None:
        """Take over the schedule of an order of the same data for other ranks.

        Args:
            schedule: That schedule.
            is_resized: Whether its batches had another size.

        Raises:
            ConfigError: Weights were set during the run, and phases of the argument have moved with the size.
        """
        starts = [phase.start for phase in self._given.phases]
        is_set = any(phase.is_set for phase in schedule.phases)
        if not is_set and is_resized:
            return  # phases that count batches are those of the present size
        if is_resized and not set(starts) >= {phase.start for phase in schedule.phases if not phase.is_set}:
            raise ConfigError(
                "weights were set, and `weights` has phases that count batches, whose size changes with the "
                "ranks: give the data set `global_batch_size`, or phases in samples"
            )
        self.schedule = schedule

    def counts(self, position: int) -> dict[str, int]:
        """Return the number of samples of each stream among the first `position` of the run."""
        given = _native.mix_counts(self.schedule.native(), position)
        return dict(zip(self.schedule.names, given, strict=True))

    def set_weights(self, start: int, weights: Mapping[str, float]) -> None:
        """Replace the weights from a sample of the run on.

        Raises:
            ConfigError: The weights are not valid.
        """
        before, self.schedule = self.schedule, self.schedule.with_weights(start, weights)
        try:
            self.schedule.check_sizes(self._reader.sizes)
            self._order(0)
        except ConfigError:
            self.schedule = before
            raise

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of `cursor`, with the phases of the schedule."""
        return super().state(cursor) | {"weights": self.schedule.state()}

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor`, and take over weights that were set during the run, in place of later ones given.

        Raises:
            StateMismatchError: The state was saved with other data, another order, or other weights before
                its position.
            ConfigError: It is not a state of `hocket.stream`.
        """
        if not isinstance(state, Mapping) or "weights" not in state:
            raise StateMismatchError(
                "the state has no `weights`, and this data set has: give the streams the weights of the "
                "saved run, or start without this state"
            )
        rest = {name: value for name, value in state.items() if name != "weights"}
        check_keys(rest)
        self.settings.check(rest)
        probe = Cursor()
        probe.load(rest, self.settings, num_batches=self.num_batches(0))
        position = self.position(probe.epoch, probe.batch)
        self.schedule = self._given.resume(state["weights"], position)
        unused = [phase.start for phase in self._given.phases if phase not in self.schedule.phases]
        if self._rank == 0 and (unused := [start for start in unused if start >= max(position, 1)]):
            logger.warning(
                "`weights` has phases from samples %s, which are not used: the state has weights that "
                "`set_weights` made, and they go on; call it to change them",
                unused,
            )
        cursor.load(rest, self.settings, num_batches=self.num_batches(0))

    def _order(self, epoch: int) -> _native.EpochOrder:
        return self._reader.mix.scheduled_order(
            self.settings, self.schedule.native(), epoch_size=self.settings.epoch_size, epoch=epoch
        )


def log_notices(order: SampleOrder, of_data: Sequence[str] = ()) -> None:
    """Log what the order does at the end of an epoch, and what is to be said of the data."""
    for level, message in [*((logging.WARNING, notice) for notice in of_data), *order.notices()]:
        logger.log(level, "%s", message)


def describe_mixture(reader: DatasetReader) -> str:
    """Return the `mixture` of a state: `whole`, or a digest of the number of samples per stream."""
    return WHOLE if reader.counts == reader.sizes else digest(reader.counts)
