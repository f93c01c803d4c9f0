"""Simulation of downloads, cache use and shuffle quality on a cluster, from the index alone."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.native.arguments import check_arguments
from hocket.stream.errors import ConfigError
from hocket.stream.read.cursor import WHOLE, OrderSettings
from hocket.stream.read.dataset_index import DatasetIndex
from hocket.stream.settings.defaults import SHUFFLE_BLOCK_SIZE, SHUFFLE_SEED, resolve_canonical_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster and its reading settings.

    Raises:
        ConfigError: A number is below 1.
    """

    num_nodes: int = 1
    """Number of nodes; the ranks of a node share one cache."""

    ranks_per_node: int = 1
    """Number of data-parallel ranks per node."""

    batch_size: int = 32
    """Number of samples in a batch on each rank."""

    cache_limit: int | None = None
    """Maximum bytes of raw shards in the cache of a node, with LRU eviction. None for no limit."""

    shuffle: bool = True
    """Whether shards and blocks are permuted."""

    shuffle_seed: int = SHUFFLE_SEED
    """Seed of the permutations."""

    shuffle_block_size: int = SHUFFLE_BLOCK_SIZE
    """Number of samples in a shuffle block."""

    num_canonical_nodes: int | None = None
    """Number of lanes; by default as `StreamingDataset` chooses it."""

    def __post_init__(self) -> None:
        for name in (
            "num_nodes",
            "ranks_per_node",
            "batch_size",
            "cache_limit",
            "shuffle_block_size",
            "num_canonical_nodes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}: expected at least 1")

    @property
    def global_batch_size(self) -> int:
        """Number of samples in a batch over all ranks."""
        return self.batch_size * self.ranks_per_node * self.num_nodes

    @property
    def resolved_canonical_nodes(self) -> int:
        """Number of lanes that each batch is drawn from: `num_canonical_nodes` or its default."""
        return resolve_canonical_nodes(
            self.num_canonical_nodes, global_batch_size=self.global_batch_size, shuffle=self.shuffle
        )


check_arguments([Cluster])


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """Reads of one node in the simulated batches."""

    num_samples: int

    num_shards: int
    """Number of distinct shards."""

    num_fetches: int
    """Number of fetched shards, counting a shard again after its eviction."""

    fetched_bytes: int
    """Stored bytes of the fetched shards."""

    cache_bytes: int
    """Largest total size of shards between first and last use. A smaller cache fetches shards again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The result for an epoch, or for its first batches."""

    num_samples: int
    """Number of samples in the data set."""

    num_shards: int

    num_batches: int
    """Number of batches in the whole epoch."""

    batches_seen: int
    """Number of simulated batches."""

    nodes: tuple[NodeUse, ...]

    shards_per_batch: float
    """Mean number of distinct shards in a global batch."""

    uniform_shards_per_batch: float
    """Expected number for a batch drawn uniformly from the data set."""

    neighbour_distance: float | None
    """Mean distance in the order between neighbours in a shard: 1 for a uniform permutation of the data
    set, 0 for storage order. None unless the whole epoch was simulated."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole epoch was simulated."""
        return self.batches_seen == self.num_batches


def simulate(
    uri: str | os.PathLike[str], cluster: Cluster, *, epoch: int = 0, max_samples: int = 4_000_000
) -> Simulation:
    """Simulate the reads of a cluster in an epoch, or in its first `max_samples` samples.

    Uses the native order and reads only the index. Memory and time are proportional to the number of
    simulated samples and of shards.

    Args:
        uri: Path or URI of the data set's folder.
        cluster: The cluster.
        epoch: The epoch.
        max_samples: Number of samples to simulate, rounded down to batches, but at least one batch.

    Raises:
        ConfigError: There are more ranks than samples, the lanes do not divide the batch, or another
            argument is not valid.
        IndexNotFoundError: There is no index.
        IndexCorruptError: The index is not valid.
        StoreError: The object store failed.
    """
    dataset_index = DatasetIndex(uri)
    total = dataset_index.index.num_samples
    num_ranks = cluster.num_nodes * cluster.ranks_per_node
    if total < num_ranks:
        raise ConfigError(f"the data set has {total} samples for {num_ranks} ranks: expected one for each")
    if max_samples < 1 or epoch < 0:
        raise ConfigError(f"`max_samples` is {max_samples} and `epoch` {epoch}: expected 1 and 0, or more")
    order = _order(dataset_index, cluster, epoch)
    num_seen = min(order.num_batches, max(1, max_samples // cluster.global_batch_size))
    sizes = np.array([shard.num_samples for shard in dataset_index.shards], np.int64)
    edges = np.cumsum(sizes)
    batches = [np.array(order.sample_ids(number), np.int64) for number in range(num_seen)]
    shards = [np.searchsorted(edges, ids, side="right") for ids in batches]
    parts = [_parts(order, number, cluster, ids) for number, ids in enumerate(shards)]
    is_whole = num_seen == order.num_batches
    return Simulation(
        num_samples=total,
        num_shards=len(sizes),
        num_batches=order.num_batches,
        batches_seen=num_seen,
        nodes=tuple(_use(dataset_index, node, cluster.cache_limit) for node in zip(*parts, strict=True)),
        shards_per_batch=float(np.mean([len(np.unique(ids)) for ids in shards])),
        uniform_shards_per_batch=_uniform_shards(sizes, min(cluster.global_batch_size, total)),
        neighbour_distance=_neighbour_distance(np.concatenate(batches), edges) if is_whole else None,
    )


def _order(dataset_index: DatasetIndex, cluster: Cluster, epoch: int) -> _native.EpochOrder:
    mix = _native.StreamMix([dataset_index.index], [dataset_index.index.num_samples])
    settings = OrderSettings(
        fingerprint=dataset_index.index.fingerprint,
        mixture=WHOLE,
        epoch_size=mix.num_samples,
        global_batch_size=cluster.global_batch_size,
        num_canonical_nodes=cluster.resolved_canonical_nodes,
        shuffle=cluster.shuffle,
        shuffle_seed=cluster.shuffle_seed,
        shuffle_block_size=cluster.shuffle_block_size,
    )
    return settings.order(mix, epoch)


def _parts(
    order: _native.EpochOrder, batch: int, cluster: Cluster, ids: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Split the samples of a batch by node; consecutive ranks read consecutive parts."""
    world_size = cluster.num_nodes * cluster.ranks_per_node
    counts = [order.share(batch, rank, world_size)[0] for rank in range(world_size)]
    ends = np.cumsum(counts)[cluster.ranks_per_node - 1 :: cluster.ranks_per_node]
    return np.split(ids, ends[:-1])


def _use(
    dataset_index: DatasetIndex, batches: Sequence[NDArray[np.int64]], cache_limit: int | None
) -> NodeUse:
    raw = [shard.raw_bytes for shard in dataset_index.shards]
    stored = [shard.stored_bytes for shard in dataset_index.shards]
    steps = [list(dict.fromkeys(ids.tolist())) for ids in batches]
    fetched = _fetches(steps, raw, cache_limit)
    return NodeUse(
        num_samples=sum(len(ids) for ids in batches),
        num_shards=len(set().union(*steps)),
        num_fetches=len(fetched),
        fetched_bytes=sum(stored[shard] for shard in fetched),
        cache_bytes=_live_bytes(steps, raw),
    )


def _fetches(steps: list[list[int]], raw: list[int], limit: int | None) -> list[int]:
    """Return the fetched shards in order, for a cache with LRU eviction."""
    cached: OrderedDict[int, None] = OrderedDict()
    num_bytes = 0
    fetched = []
    for step in steps:
        for shard in step:
            if shard in cached:
                cached.move_to_end(shard)
                continue
            fetched.append(shard)
            cached[shard] = None
            num_bytes += raw[shard]
            while limit is not None and num_bytes > limit and len(cached) > 1:
                num_bytes -= raw[cached.popitem(last=False)[0]]
    return fetched


def _live_bytes(steps: list[list[int]], raw: list[int]) -> int:
    """Return the maximum of the bytes of shards that are between their first and their last batch."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for shard in step:
            first.setdefault(shard, number)
            last[shard] = number
    change = np.zeros(len(steps) + 1, np.int64)
    for shard, number in first.items():
        change[number] += raw[shard]
        change[last[shard] + 1] -= raw[shard]
    return int(np.cumsum(change).max())


def _uniform_shards(sizes: NDArray[np.int64], batch: int) -> float:
    """Return the mean number of distinct shards among `batch` samples drawn without replacement."""
    total = int(sizes.sum())
    free = total - batch
    missed = 0.0
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        if free >= size:
            logs = (math.lgamma(total - size + 1) - math.lgamma(free - size + 1)
                    + math.lgamma(free + 1) - math.lgamma(total + 1))  # fmt: skip
            missed += int(count) * math.exp(logs)
    return len(sizes) - missed


def _neighbour_distance(ids: NDArray[np.int64], edges: NDArray[np.int64]) -> float:
    """Return the mean distance in the order between neighbours in a shard; 0 as stored, 1 if uniform."""
    total = len(ids)
    positions = np.empty(total, np.int64)
    positions[ids] = np.arange(total)
    distances = np.abs(np.diff(positions))
    distances = np.delete(distances, np.unique(edges[(edges > 0) & (edges < total)]) - 1)
    # Two distinct positions of `total`, drawn uniformly, are (total + 1) / 3 apart on average; neighbours in
    # storage order are 1 apart.
    uniform = (total + 1) / 3
    return float((distances.mean() - 1) / (uniform - 1)) if distances.size and total > 2 else 0.0
