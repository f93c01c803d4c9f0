"""What a cluster would fetch, keep and see of a data set, counted on its real order from its index alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.defaults import MOST_LANES, SHUFFLE_BLOCK_SIZE, SHUFFLE_SEED
from hocket.stream.errors import ConfigError
from hocket.stream.inventory import Inventory


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines, and how they read.

    Raises:
        ConfigError: A number is below 1.
    """

    num_nodes: int = 1
    """Machines, each with a cache of its own that all of its ranks share."""

    ranks_per_node: int = 1
    """Data-parallel ranks of each."""

    batch_size: int = 32
    """Samples of a batch on each rank."""

    cache_limit: int | None = None
    """Bytes of raw shards that a machine keeps; what was used longest ago goes first. None for all."""

    shuffle: bool = True
    """Whether shards and blocks are permuted."""

    shuffle_seed: int = SHUFFLE_SEED
    """Of the permutations."""

    shuffle_block_size: int = SHUFFLE_BLOCK_SIZE
    """Samples of a block."""

    num_canonical_nodes: int | None = None
    """Lanes; by default as `StreamingDataset` chooses them."""

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
        """Samples of a batch over all ranks."""
        return self.batch_size * self.ranks_per_node * self.num_nodes

    @property
    def lanes(self) -> int:
        """Lanes that each batch is drawn from."""
        default = math.gcd(self.global_batch_size, MOST_LANES) if self.shuffle else 1
        return self.num_canonical_nodes or default


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """What one machine does in the batches that were looked at."""

    num_samples: int

    num_shards: int
    """Different shards that it reads."""

    num_fetches: int
    """Shards that it fetches, those again that its cache had given up."""

    fetched_bytes: int
    """Bytes of those, as they are stored."""

    cache_bytes: int
    """The most bytes of raw shards between their first and their last use: with less, some come twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """An epoch, or its beginning."""

    num_samples: int
    """Of the data set."""

    num_shards: int

    num_batches: int
    """Of the whole epoch."""

    batches_seen: int
    """Batches that were looked at, from the first on."""

    nodes: tuple[NodeUse, ...]

    shards_per_batch: float
    """Different shards in a global batch, on average."""

    uniform_shards_per_batch: float
    """What a batch drawn uniformly from the whole data set would have."""

    neighbour_distance: float | None
    """How far samples that are neighbours in a shard are apart in the order, on average, where 1 is what a
    uniform permutation of the whole data set gives and 0 is the order of storage. None unless the whole epoch
    was looked at."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole epoch was looked at."""
        return self.batches_seen == self.num_batches


def simulate(uri: str, cluster: Cluster, *, epoch: int = 0, max_samples: int = 4_000_000) -> Simulation:
    """Count what a cluster does with a data set in an epoch, or in its first `max_samples` samples.

    The order is the native one, and only the index is read. Memory and time grow with the samples looked at
    and with the shards, not with the size of the data set.

    Args:
        uri: The data set's folder, a path or a URI.
        cluster: The machines.
        epoch: Which epoch's order.
        max_samples: How many samples to look at; at least one batch is.

    Raises:
        ConfigError: There are more ranks than samples, the lanes do not divide the batch, or another argument
            does not work.
        IndexNotFoundError: There is no data set.
        IndexCorruptError: Its index cannot be trusted.
        StoreError: The store's own errors, as they come.
    """
    inventory = Inventory(uri)
    total = inventory.index.num_samples
    num_ranks = cluster.num_nodes * cluster.ranks_per_node
    if total < num_ranks:
        raise ConfigError(f"the data set has {total} samples for {num_ranks} ranks: expected one for each")
    if max_samples < 1 or epoch < 0:
        raise ConfigError(f"`max_samples` is {max_samples} and `epoch` {epoch}: expected 1 and 0, or more")
    order = _order(inventory, cluster, epoch)
    num_seen = min(order.num_batches, max(1, max_samples // cluster.global_batch_size))
    sizes = np.array([shard.num_samples for shard in inventory.shards], np.int64)
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
        nodes=tuple(_use(inventory, node, cluster.cache_limit) for node in zip(*parts, strict=True)),
        shards_per_batch=float(np.mean([len(np.unique(ids)) for ids in shards])),
        uniform_shards_per_batch=_uniform_shards(sizes, min(cluster.global_batch_size, total)),
        neighbour_distance=_neighbour_distance(np.concatenate(batches), edges) if is_whole else None,
    )


def _order(inventory: Inventory, cluster: Cluster, epoch: int) -> _native.EpochOrder:
    mix = _native.StreamMix([inventory.index], [inventory.index.num_samples])
    return mix.order(
        epoch=epoch,
        global_batch_size=cluster.global_batch_size,
        num_canonical_nodes=cluster.lanes,
        shuffle=cluster.shuffle,
        shuffle_seed=cluster.shuffle_seed,
        shuffle_block_size=cluster.shuffle_block_size,
        tail="short",
        batching_method="random",
        sampling_method="balanced",
        sampling_granularity=1,
    )


def _parts(
    order: _native.EpochOrder, batch: int, cluster: Cluster, ids: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """What of a batch each node reads: consecutive ranks take consecutive parts."""
    world_size = cluster.num_nodes * cluster.ranks_per_node
    counts = [order.share(batch, rank, world_size)[0] for rank in range(world_size)]
    ends = np.cumsum(counts)[cluster.ranks_per_node - 1 :: cluster.ranks_per_node]
    return np.split(ids, ends[:-1])


def _use(inventory: Inventory, batches: Sequence[NDArray[np.int64]], cache_limit: int | None) -> NodeUse:
    raw = [shard.raw_bytes for shard in inventory.shards]
    stored = [shard.stored_bytes for shard in inventory.shards]
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
    """The shards that are fetched, in order, by a cache that gives up what was used longest ago."""
    kept: OrderedDict[int, None] = OrderedDict()
    num_bytes = 0
    fetched = []
    for step in steps:
        for shard in step:
            if shard in kept:
                kept.move_to_end(shard)
                continue
            fetched.append(shard)
            kept[shard] = None
            num_bytes += raw[shard]
            while limit is not None and num_bytes > limit and len(kept) > 1:
                num_bytes -= raw[kept.popitem(last=False)[0]]
    return fetched


def _live_bytes(steps: list[list[int]], raw: list[int]) -> int:
    """The most bytes of shards that are between their first and their last batch at once."""
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
    """Different shards among `batch` samples drawn without replacement, on average."""
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
    """Mean distance in the order of neighbours in a shard: 0 as stored, 1 as in a uniform permutation."""
    total = len(ids)
    places = np.empty(total, np.int64)
    places[ids] = np.arange(total)
    apart = np.abs(np.diff(places))
    apart = np.delete(apart, np.unique(edges[(edges > 0) & (edges < total)]) - 1)
    # Two different places of `total`, drawn uniformly, are (total + 1) / 3 apart; neighbours at least 1.
    uniform = (total + 1) / 3
    return float((apart.mean() - 1) / (uniform - 1)) if apart.size and total > 2 else 0.0
