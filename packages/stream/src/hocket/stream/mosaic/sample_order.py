"""The plan for the order of mosaicml-streaming, and its state format."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.stream.errors import ConfigError, StateMismatchError, StreamError
from hocket.stream.mosaic.batching import Batches, portions, stratify, take_device_turns, take_turns
from hocket.stream.mosaic.mosaic_order import MosaicOrder
from hocket.stream.mosaic.partitions import Places, partition
from hocket.stream.mosaic.sampling import Ids, draw
from hocket.stream.mosaic.shuffles import BLOCK_ALGORITHMS, Shuffle
from hocket.stream.read.cursor import Cursor
from hocket.stream.read.dataset_reader import DatasetReader
from hocket.stream.read.sample_order import EpochPass
from hocket.stream.settings.order_rules import OrderRules

_STATE_KEYS = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes")
_VOID = -1
_LEAST_BLOCK = 1 << 18
_SHARED_BLOCK = 4_000_000
_MANY_NODES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MosaicSettings(OrderRules):
    """The settings of the order, besides data, ranks and epoch.

    `shuffle_block_size` is at least 2; None is max(262,144, 4,000,000 / canonical nodes).
    `num_canonical_nodes` is the number of parts shuffled separately; None is 64 per node for `py1s` and
    `py2s`, else 1 per node.
    """

    order: MosaicOrder
    """The algorithms."""

    shares: tuple[float, ...]
    """Share of each stream in an epoch; the sum is 1."""

    batch_size: int
    """Number of samples in a batch on each rank."""


class MosaicSampleOrder:
    """The order of mosaicml-streaming. Planning takes time and memory proportional to the samples.

    After a resume, the samples that were read are dropped, and the rest is dealt to the current ranks. Global
    batches are the same sets of samples on any number of ranks that divides the global batch size, except
    for the last ones, which are padded with repeated samples. With the other batching methods all
    batches are full, and a batch that was read in part is repeated. With `per_stream` and
    `device_per_stream` the batches depend on the number of ranks: an epoch that is resumed on another
    number leaves samples out and repeats others, without a trace in the state.

    Raises:
        ConfigError: Neither of nodes and canonical nodes divides the other, or a stream has no samples in the
            batches.
    """

    def __init__(
        self,
        reader: DatasetReader,
        settings: MosaicSettings,
        data_parallel: tuple[int, int],
        *,
        num_nodes: int,
    ) -> None:
        self.settings = settings
        self._reader = reader
        self._rank, self._world_size = data_parallel
        self._num_nodes = num_nodes
        self._global_batch = settings.batch_size * self._world_size
        self._shard_sizes = reader.shard_sizes()
        self._cached: tuple[int, Ids] | None = None
        nodes = settings.num_canonical_nodes
        if nodes is None:
            nodes = num_nodes * (_MANY_NODES if settings.order.shuffle_algo in ("py1s", "py2s") else 1)
        self._begin(_RunOrigin(num_canonical_nodes=nodes, initial_nodes=num_nodes))

    def _begin(self, origin: _RunOrigin) -> None:
        self._origin, self._cached = origin, None
        self._blocks()
        self._whole = self._extent(0)
        if not self._whole[0]:
            raise ConfigError(
                f"the global batch is {self._global_batch} samples, and with "
                f"`batching_method={self.settings.batching_method!r}` some stream does not fill its part of "
                "one: expected at least one batch; make it smaller or the stream's share larger"
            )
        if origin.sample > self._last_sample:
            raise StateMismatchError(
                f"`sample_in_epoch` is {origin.sample} in the state, and an epoch has {self._whole[2]} "
                f"samples here: expected at most {self._last_sample}, which is its end; give the data, "
                "streams and batch size that the run began with, or if that epoch was over, "
                f"`epoch={origin.epoch + 1}` and `sample_in_epoch=0` in the state"
            )
        self._rest = self._extent(origin.sample) if origin.sample else self._whole

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, with those before a resume in the current size."""
        if epoch == self._origin.epoch:
            return self._done() + self._rest[0]
        return self._whole[0]

    def num_local_samples(self, epoch: int) -> int:
        """Return the number of samples that this rank yields in a whole epoch."""
        return self._whole[1]

    def passes(self, epoch: int, start: int) -> EpochPass:
        """Return the iteration from batch `start` on. Its order holds the batches of this rank only."""
        positions = self._places(epoch, self._sample(epoch, start))
        is_sample = positions != _VOID
        shares = np.stack([is_sample[self._rank].sum(axis=1), is_sample.sum(axis=(0, 2))], axis=1)
        rank_positions = positions[self._rank].copy()
        # A rank without a share of the last batch reads one sample, so that it has a step.
        rank_positions[shares[:, 0] == 0, 0] = positions[is_sample].max(initial=0)
        edges = np.concatenate([[0], (rank_positions != _VOID).sum(axis=1).cumsum()]).astype(np.uint64)
        ids = self._ids(epoch)[rank_positions[rank_positions != _VOID]].astype(np.uint64)
        order = self._reader.mix.listed_order(ids.data, edges.data)
        return EpochPass(order=order, start=start, rank=0, world_size=1, shares=shares)

    def batch_ids(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of a global batch, rank by rank, as numbers in storage order."""
        if not 0 <= batch < self.num_batches(epoch):
            raise IndexError(
                f"batch {batch} of epoch {epoch}: expected a number from 0 to below {self.num_batches(epoch)}"
            )
        positions = self._places(epoch, self._sample(epoch, batch))[:, 0]
        ids: list[int] = self._ids(epoch)[positions[positions != _VOID]].tolist()
        return ids

    def notices(self) -> list[tuple[int, str]]:
        """Return log messages about samples that are repeated or left out to make batches even."""
        method = self.settings.batching_method
        configuration = "`order='mosaic'`, " + (
            f"`batching_method={method!r}`, " if method != "random" else ""
        )
        configuration += f"{self._origin.num_canonical_nodes} canonical nodes, {self._world_size} ranks"
        num_extra = self._whole[2] - self._num_samples
        if num_extra > 0:
            return [(logging.WARNING, f"{num_extra} samples of each epoch are repeated ({configuration})")]
        return (
            [(logging.WARNING, f"each epoch leaves {-num_extra} samples out ({configuration})")]
            if num_extra
            else []
        )

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the position of `cursor` as a state of mosaicml-streaming."""
        is_over = cursor.batch >= self.num_batches(cursor.epoch)
        if is_over and cursor.epoch == self._origin.epoch:
            sample = min(self._origin.sample + self._rest[2], self._last_sample)
        else:
            sample = self._whole[2] if is_over else self._sample(cursor.epoch, cursor.batch)
        return {
            "epoch": cursor.epoch,
            "sample_in_epoch": sample,
            "num_canonical_nodes": self._origin.num_canonical_nodes,
            "shuffle_seed": self.settings.shuffle_seed,
            "initial_physical_nodes": self._origin.initial_nodes,
        }

    def load(self, state: Mapping[str, Any], cursor: Cursor) -> None:
        """Move `cursor` to the position in a state of mosaicml-streaming, and adopt its canonical nodes.

        Raises:
            StateMismatchError: The state's seed or canonical nodes differ from those given here, or its
                position is past the end of the epoch.
            ConfigError: The state has another format, or it gives no order for this number of machines.
        """
        epoch, sample, nodes, seed, initial_nodes = _parse(state)
        given = self.settings.num_canonical_nodes
        for name, saved, current in [
            ("shuffle_seed", seed, self.settings.shuffle_seed),
            ("num_canonical_nodes", nodes, nodes if given is None else given),
        ]:
            if saved != current:
                raise StateMismatchError(
                    f"`{name}` is {saved} in the state and {current} here: expected equal "
                    f"values, because the order of samples depends on them; pass `{name}={saved}`, or start "
                    "without this state"
                )
        # mosaicml-streaming saves epoch -1 before the first epoch.
        origin = _RunOrigin(
            epoch=max(epoch, 0), sample=sample, num_canonical_nodes=nodes, initial_nodes=initial_nodes
        )
        previous_origin = self._origin
        try:
            self._begin(origin)
        except StreamError:
            self._begin(previous_origin)
            raise
        cursor.go(origin.epoch, self._done())

    @property
    def _last_sample(self) -> int:
        """Upper bound of samples in an epoch, for all numbers of ranks that divide the global batch."""
        return self._whole[0] * self._global_batch

    @property
    def _num_samples(self) -> int:
        return sum(self._reader.counts)

    def _done(self) -> int:
        """Return the number of current batches that the samples before the origin count as."""
        batches, rest = divmod(self._origin.sample, self._global_batch)
        return batches + (rest > 0 and self.settings.batching_method == "random")

    def _sample(self, epoch: int, batch: int) -> int:
        """Return the number of samples before a batch of an epoch."""
        num_done = self._done()
        if epoch != self._origin.epoch or batch < num_done:
            return batch * self._global_batch
        return self._origin.sample + (batch - num_done) * self._global_batch

    def _places(self, epoch: int, drop_first: int) -> Places:
        """Return each rank's batches, `(ranks, batches, batch_size)`, as positions; -1 is padding."""
        if self.settings.batching_method == "random":
            return self._partition(self._num_samples, drop_first=drop_first)
        batches = self._stream_batches(epoch)[drop_first // self._global_batch :]
        ranks = batches.reshape(len(batches), self._world_size, self.settings.batch_size)
        return ranks.transpose(1, 0, 2)

    def _stream_batches(self, epoch: int) -> Batches:
        """Return the global batches of an epoch in which the streams are sampled and dealt separately."""
        settings, counts = self.settings, self._reader.counts
        seed = settings.shuffle_seed + self._drift(epoch)
        if settings.batching_method == "device_per_stream":
            return take_device_turns(
                self._node_streams(), settings.batch_size, world_size=self._world_size, seed=seed
            )
        parts = None
        if settings.batching_method == "stratified":
            parts = portions(settings.shares, self._global_batch)
        streams = []
        for first, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
            # With `stratified`, a stream is dealt sample by sample, as on one node.
            ranks = self._partition(count, nodes=None if parts is None else 1)
            positions = ranks.transpose(1, 0, 2).reshape(-1)
            streams.append(first + positions[positions != _VOID] if count else positions[:0])
        if parts is not None:
            return stratify(streams, parts)
        return take_turns(streams, self._global_batch, seed=seed)

    def _node_streams(self) -> list[list[Batches]]:
        """Return the samples of each stream on each node; each canonical node is dealt as a separate node."""
        num_canonical_nodes = self._origin.num_canonical_nodes
        if num_canonical_nodes % self._num_nodes:
            raise ConfigError(
                f"there are {self._num_nodes} machines and {num_canonical_nodes} canonical nodes: expected "
                "the machines to divide them with `batching_method='device_per_stream'`; use another "
                "number of machines, or give `num_canonical_nodes` when the run begins"
            )
        counts = self._reader.counts
        nodes: list[list[Batches]] = [[] for _ in range(self._num_nodes)]
        for first, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
            dealt = self._partition(count, nodes=num_canonical_nodes)[:, :, 0]
            for streams, ranks in zip(nodes, np.split(dealt, self._num_nodes), strict=True):
                positions = ranks.T.reshape(-1)
                streams.append(first + positions[positions != _VOID] if count else positions[:0])
        return nodes

    def _partition(self, num_samples: int, *, drop_first: int = 0, nodes: int | None = None) -> Places:
        """Return each rank's batches as positions; sample by sample if a number of nodes is given."""
        return partition(
            self.settings.order.partition_algo,
            num_samples,
            num_canonical_nodes=self._origin.num_canonical_nodes,
            num_nodes=nodes or self._num_nodes,
            ranks_per_node=self._world_size // self._num_nodes,
            batch_size=1 if nodes else self.settings.batch_size,
            drop_first=drop_first,
            initial_nodes=self._origin.initial_nodes,
        )

    def _extent(self, drop_first: int) -> tuple[int, int, int]:
        """Return the batches, samples on this rank, and samples over all ranks in the rest of an epoch."""
        is_sample = self._places(0, drop_first) != _VOID
        return is_sample.shape[1], int(is_sample[self._rank].sum()), int(is_sample.sum())

    def _drift(self, epoch: int) -> int:
        """Return the epoch's offset to the seed for the order of streams."""
        is_new = self.settings.shuffle and self.settings.sampling_method == "balanced"
        return epoch if is_new else 0

    def _ids(self, epoch: int) -> Ids:
        """Return the samples of an epoch by position."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._draw_all(epoch))
        return self._cached[1]

    def _draw_all(self, epoch: int) -> Ids:
        sizes, counts, blocks = self._shard_sizes, self._reader.counts, self._blocks()
        if self.settings.batching_method == "random":
            return self._draw(epoch, sizes, counts, blocks[0])
        # Each stream is sampled and shuffled separately.
        parts = []
        first = 0
        for stream, count, block in zip(sizes, counts, blocks, strict=True):
            parts.append(first + self._draw(epoch, [stream], [count], block))
            first += sum(stream)
        return np.concatenate(parts)

    def _blocks(self) -> list[int]:
        """Return the shuffle's block size: one, or one per stream if they are shuffled separately."""
        settings = self.settings
        block = settings.shuffle_block_size
        if block is None:
            block = max(_SHARED_BLOCK // self._origin.num_canonical_nodes, _LEAST_BLOCK)
        if settings.batching_method == "random":
            return [block]
        blocks = [int(block * share) for share in settings.shares]
        if settings.shuffle and settings.order.shuffle_algo in BLOCK_ALGORITHMS and min(blocks) < 2:
            raise ConfigError(
                f"`shuffle_block_size` is {block}, of which stream {blocks.index(min(blocks))} has "
                f"{min(blocks)} samples by its share: expected at least 2 with "
                f"`batching_method={settings.batching_method!r}`; make it larger"
            )
        return blocks

    def _draw(self, epoch: int, sizes: Sequence[Sequence[int]], counts: Sequence[int], block: int) -> Ids:
        settings = self.settings
        units, ids = draw(
            sizes,
            counts,
            seed=settings.shuffle_seed,
            epoch=epoch,
            shuffle=settings.shuffle,
            sampling_method=settings.sampling_method,
            granularity=settings.sampling_granularity,
        )
        if not settings.shuffle:
            return ids
        shuffle = Shuffle(
            unit_sizes=units,
            num_canonical_nodes=self._origin.num_canonical_nodes,
            seed=settings.shuffle_seed,
            epoch=epoch,
            block_size=block,
        )
        return ids[shuffle.run(settings.order.shuffle_algo)]

    def __getstate__(self) -> dict[str, Any]:
        # Workers compute the plan, which is cheaper than pickling it.
        return self.__dict__ | {"_cached": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunOrigin:
    """The start of the run, or the position of the last loaded state."""

    num_canonical_nodes: int
    initial_nodes: int
    epoch: int = 0
    sample: int = 0


def _parse(state: Mapping[str, Any]) -> list[int]:
    minimums = dict(zip(_STATE_KEYS, (-1, 0, 1, 0, 1), strict=True))
    is_whole = isinstance(state, Mapping) and set(state) == set(_STATE_KEYS)
    if not is_whole or any(
        type(state[key]) is not int or state[key] < minimum for key, minimum in minimums.items()
    ):
        raise ConfigError(
            f"the state is {state!r:.300}: expected the keys {list(_STATE_KEYS)} with whole numbers, as "
            "mosaicml-streaming and `order='mosaic'` save them"
        )
    return [state[key] for key in _STATE_KEYS]
