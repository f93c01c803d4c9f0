"""The arguments of a data set that determine its order, and the plan made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.native import _native
from hocket.stream.errors import ConfigError
from hocket.stream.mosaic import MosaicOrder, MosaicSampleOrder, MosaicSettings
from hocket.stream.mosaic import batching as mosaic_batching
from hocket.stream.mosaic import sampling as mosaic_sampling
from hocket.stream.read.cursor import OrderSettings
from hocket.stream.read.dataset_reader import DatasetReader
from hocket.stream.read.sample_order import (
    WEIGHTED,
    MixedSampleOrder,
    NativeSampleOrder,
    SampleOrder,
    describe_mixture,
)
from hocket.stream.read.streams import Stream, name_streams
from hocket.stream.settings.defaults import SHUFFLE_BLOCK_SIZE, resolve_canonical_nodes
from hocket.stream.settings.mix_schedule import BatchStarts, MixSchedule, Weights
from hocket.stream.settings.order_rules import OrderRules
from hocket.stream.settings.validation import switch, whole
from hocket.stream.settings.weights import parse_count, resolve_counts

_CHOICES = {
    "tail": ("short", "drop", "pad"),
    "batching_method": mosaic_batching.METHODS,
    "sampling_method": ("balanced", "fixed"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderOptions(OrderRules):
    """The arguments of `StreamingDataset` that determine the order; see there.

    Raises:
        ConfigError: An argument is not valid, or cannot be combined with another.
    """

    mosaic: MosaicOrder | None = None
    """The order of mosaicml-streaming; None for the native one."""

    weights: Weights | None = None
    """Weights of the streams by sample of the run; None for those of the streams."""

    epoch_size: int | str | None = None
    """Number of samples in an epoch; None for the number that the streams' weights give."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"`{name}` is {value!r}: expected one of {choices}")
        validated: dict[str, object] = {
            "shuffle": switch("shuffle", self.shuffle),
            "shuffle_seed": whole("shuffle_seed", self.shuffle_seed, most=(1 << 64) - 1),
        }
        for name in ("shuffle_block_size", "num_canonical_nodes", "sampling_granularity"):
            value = getattr(self, name)
            if value is not None:
                validated[name] = whole(name, value, least=1)
        for name, value in validated.items():
            object.__setattr__(self, name, value)
        if self.mosaic:
            self._check_mosaic()
        elif self.weights is not None and (self.batching_method != "random" or self.tail == "pad"):
            raise ConfigError(
                f"`weights` is given beside `batching_method={self.batching_method!r}` and "
                f"`tail={self.tail!r}`: expected 'random', and 'short' or 'drop'"
            )
        elif self.batching_method == "device_per_stream":
            raise ConfigError(
                "`batching_method` is 'device_per_stream', whose batches depend on the number of ranks: "
                "expected 'per_stream' with the native order, or `order='mosaic'` beside it"
            )

    def _check_mosaic(self) -> None:
        if self.weights is not None:
            raise ConfigError("`weights` is given beside `order='mosaic'`: use the native order")
        if self.tail != "short":
            raise ConfigError(
                f"`tail` is {self.tail!r} beside `order='mosaic'`, which has 'short' only: leave it out, or "
                "use the native order"
            )
        if self.shuffle_block_size == 1:
            raise ConfigError("`shuffle_block_size` is 1: expected at least 2 with `order='mosaic'`")

    def counts(
        self, streams: Sequence[Stream], sizes: Sequence[int], *, global_batch_size: int | None = None
    ) -> list[int]:
        """Return the number of samples of each stream in an epoch.

        Args:
            streams: The streams.
            sizes: Number of samples of each.
            global_batch_size: Number of samples in a batch, if it is known.

        Raises:
            ConfigError: The weights of the streams cannot be combined.
        """
        epoch_size = None if self.epoch_size is None else parse_count("epoch_size", self.epoch_size)
        if self.weights is not None:
            return self._scheduled_counts(streams, sizes, epoch_size, global_batch_size)
        if self.mosaic:
            return mosaic_sampling.resolve_counts(
                streams, sizes, epoch_size=epoch_size, seed=self.shuffle_seed
            )
        return resolve_counts(streams, sizes, epoch_size=epoch_size)

    def _scheduled_counts(
        self,
        streams: Sequence[Stream],
        sizes: Sequence[int],
        epoch_size: int | None,
        global_batch_size: int | None,
    ) -> list[int]:
        """Return the number of samples of each stream in the first epoch; later ones may have others."""
        for stream in streams:
            if (stream.proportion, stream.repeat, stream.choose) != (None, None, None):
                raise ConfigError(
                    "`weights` is given, and a stream has `proportion`, `repeat` or `choose`: expected one"
                )
        total = sum(sizes) if epoch_size is None else epoch_size
        schedule = self.schedule(streams, total, global_batch_size)
        schedule.check_sizes(sizes)
        return _native.mix_counts(schedule.native(), total)

    def schedule(
        self, streams: Sequence[Stream], epoch_size: int, global_batch_size: int | None
    ) -> MixSchedule:
        """Return the schedule that `weights` describes.

        Raises:
            ConfigError: It describes none for these streams, or has phases in batches of unknown size.
        """
        batches = None
        if global_batch_size is not None:
            batches = BatchStarts(epoch_size=epoch_size, global_batch_size=global_batch_size, tail=self.tail)
        return MixSchedule.parse(self.weights or (), name_streams(streams), batches=batches)

    def _shares(self, streams: Sequence[Stream], reader: DatasetReader) -> tuple[float, ...]:
        """Return each stream's share of an epoch, bit for bit as mosaicml-streaming computes it."""
        epoch_size = None if self.epoch_size is None else parse_count("epoch_size", self.epoch_size)
        shares = mosaic_sampling.resolve_shares(streams, reader.sizes, epoch_size=epoch_size)
        if shares is None:
            shares = np.array(reader.counts) / sum(reader.counts)
        return tuple(shares.tolist())

    def plan(
        self,
        reader: DatasetReader,
        streams: Sequence[Stream],
        data_parallel: tuple[int, int],
        *,
        global_batch_size: int,
        num_nodes: int,
    ) -> SampleOrder:
        """Return the plan of this rank for the samples of `reader`, which reads `streams`.

        Raises:
            ConfigError: Batch size, ranks or nodes do not fit the order.
        """
        if self.mosaic:
            return self._mosaic_plan(
                self.mosaic, reader, streams, data_parallel, global_batch_size, num_nodes
            )
        num_canonical_nodes = resolve_canonical_nodes(
            self.num_canonical_nodes, global_batch_size=global_batch_size, shuffle=self.shuffle
        )
        block_size = self.shuffle_block_size or SHUFFLE_BLOCK_SIZE
        defaults = {"num_canonical_nodes": num_canonical_nodes, "shuffle_block_size": block_size}
        settings = OrderSettings(
            fingerprint=reader.fingerprint,
            mixture=describe_mixture(reader) if self.weights is None else WEIGHTED,
            epoch_size=sum(reader.counts),
            global_batch_size=global_batch_size,
            **self.rules() | defaults,
        )
        if self.weights is not None:
            schedule = self.schedule(streams, settings.epoch_size, global_batch_size)
            return MixedSampleOrder(reader, settings, data_parallel, schedule)
        return NativeSampleOrder(reader, settings, data_parallel)

    def _mosaic_plan(
        self,
        order: MosaicOrder,
        reader: DatasetReader,
        streams: Sequence[Stream],
        data_parallel: tuple[int, int],
        global_batch_size: int,
        num_nodes: int,
    ) -> SampleOrder:
        world_size = data_parallel[1]
        if global_batch_size % world_size:
            raise ConfigError(
                f"the global batch is {global_batch_size} samples for {world_size} data-parallel ranks: "
                "expected a multiple of them with `order='mosaic'`, where all ranks have equal batches"
            )
        settings = MosaicSettings(
            order=order,
            shares=self._shares(streams, reader),
            batch_size=global_batch_size // world_size,
            **self.rules(),
        )
        return MosaicSampleOrder(reader, settings, data_parallel, num_nodes=num_nodes)
