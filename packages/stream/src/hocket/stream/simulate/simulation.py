"""Simulation of downloads, cache use and shuffle quality on a cluster, from the indexes alone."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.native import _native
from hocket.stream.errors import ConfigError
from hocket.stream.read.cursor import WHOLE, OrderSettings
from hocket.stream.read.dataset_index import DatasetIndex
from hocket.stream.read.dataset_reader import digest
from hocket.stream.read.sample_order import WEIGHTED
from hocket.stream.read.streams import Stream, name_streams
from hocket.stream.settings.mix_schedule import BatchStarts, MixSchedule, Weights
from hocket.stream.simulate.cluster import Cluster
from hocket.stream.simulate.node_reads import NodeReads
from hocket.stream.simulate.results import MixSeries, Simulation, SimulationSeries, StreamUse

#: Groups of batches in a picture.
MOST_POINTS = 160


def simulate(
    uri: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    cluster: Cluster,
    *,
    split: str | None = None,
    config: str | None = None,
    weights: Weights | None = None,
    epoch_size: int | None = None,
    epoch: int = 0,
    max_samples: int = 4_000_000,
) -> Simulation:
    """Simulate the reads of a cluster in an epoch, or in its first `max_samples` samples.

    Uses the native order and reads only the indexes. Memory and time are proportional to the number of
    simulated samples and of shards.

    Args:
        uri: Path or URI of the data set's folder, or of those of several streams.
        cluster: The cluster.
        split: Subfolder of each; or a split by the names of Parquet files, as in `StreamingDataset`.
        config: Name of the configuration of a data set on a hub.
        weights: Weights of the streams by sample of the run, as in `StreamingDataset`; streams are named by
            the last part of their place.
        epoch_size: Number of samples in an epoch, with `weights`; by default that of all streams.
        epoch: The epoch.
        max_samples: Number of samples to simulate, rounded down to batches, but at least one batch.

    Raises:
        ConfigError: There are more ranks than samples, the lanes do not divide the batch, or another
            argument is not valid.
        IndexNotFoundError: There is neither an index nor Parquet files.
        IndexCorruptError: The index is not valid.
        StoreError: The object store failed.
    """
    places = [uri] if isinstance(uri, (str, os.PathLike)) else list(uri)
    indexes = [DatasetIndex(place, split=split, config=config) for place in places]
    names = name_streams([Stream(remote=place) for place in places])
    counts = [dataset_index.index.num_samples for dataset_index in indexes]
    schedule, size = None, cluster.global_batch_size
    total = sum(counts) if epoch_size is None else epoch_size
    if weights is not None:
        batches_of = BatchStarts(epoch_size=total, global_batch_size=size, tail="short")
        schedule = MixSchedule.parse(weights, names, batches=batches_of)
        schedule.check_sizes(counts)
    elif epoch_size is not None:
        raise ConfigError("`epoch_size` is given without `weights`: expected both or neither")
    num_ranks = cluster.num_nodes * cluster.ranks_per_node
    if total < num_ranks:
        raise ConfigError(f"the data set has {total} samples for {num_ranks} ranks: expected one for each")
    if max_samples < 1 or epoch < 0:
        raise ConfigError(f"`max_samples` is {max_samples} and `epoch` {epoch}: expected 1 and 0, or more")
    order = _order(indexes, cluster, epoch, schedule, total)
    num_seen = min(order.num_batches, max(1, max_samples // size))
    shards = [shard for dataset_index in indexes for shard in dataset_index.shards]
    sizes = np.array([shard.num_samples for shard in shards], np.int64)
    edges = np.cumsum(sizes)
    batches = [np.array(order.sample_ids(number), np.int64) for number in range(num_seen)]
    shard_ids = [np.searchsorted(edges, ids, side="right") for ids in batches]
    parts = [_parts(order, number, cluster, ids) for number, ids in enumerate(shard_ids)]
    reads = [NodeReads(shards, node, cluster.cache_limit) for node in zip(*parts, strict=True)]
    groups = np.unique(np.linspace(0, num_seen, MOST_POINTS + 1).round().astype(int))[1:]
    of_streams = _stream_samples(batches, counts, groups)
    is_plain = schedule is None and num_seen == order.num_batches
    return Simulation(
        num_samples=sum(counts),
        num_shards=len(sizes),
        num_batches=order.num_batches,
        batches_seen=num_seen,
        nodes=tuple(node.use() for node in reads),
        streams=tuple(
            StreamUse(name=name, num_samples=count, num_read=sum(read))
            for name, count, read in zip(names, counts, of_streams, strict=True)
        ),
        shards_per_batch=float(np.mean([len(np.unique(ids)) for ids in shard_ids])),
        uniform_shards_per_batch=_uniform_shards(sizes, min(size, sum(counts))),
        neighbour_distance=_neighbour_distance(np.concatenate(batches), edges) if is_plain else None,
        series=SimulationSeries(
            batches=tuple(groups.tolist()),
            fetched_bytes=tuple(node.fetched_series(groups) for node in reads),
            cache_bytes=tuple(node.cache_series(groups) for node in reads),
            stream_samples=of_streams,
        ),
        mix=None if schedule is None else _mix_series(schedule, total * (epoch + 1)),
    )


def _order(
    indexes: Sequence[DatasetIndex],
    cluster: Cluster,
    epoch: int,
    schedule: MixSchedule | None,
    epoch_size: int,
) -> _native.EpochOrder:
    of_streams = [dataset_index.index for dataset_index in indexes]
    fingerprints = [index.fingerprint for index in of_streams]
    mix = _native.StreamMix(of_streams, [index.num_samples for index in of_streams])
    settings = OrderSettings(
        fingerprint=fingerprints[0] if len(fingerprints) == 1 else digest(fingerprints),
        mixture=WHOLE if schedule is None else WEIGHTED,
        epoch_size=epoch_size,
        global_batch_size=cluster.global_batch_size,
        num_canonical_nodes=cluster.resolved_canonical_nodes,
        shuffle=cluster.shuffle,
        shuffle_seed=cluster.shuffle_seed,
        shuffle_block_size=cluster.shuffle_block_size,
    )
    if schedule is None:
        return settings.order(mix, epoch)
    return mix.scheduled_order(settings, schedule.native(), epoch_size=epoch_size, epoch=epoch)


def _stream_samples(
    batches: Sequence[NDArray[np.int64]], counts: Sequence[int], groups: NDArray[np.int64]
) -> tuple[tuple[int, ...], ...]:
    """Return the samples of each stream in each group of batches."""
    ends = np.cumsum(counts)
    found = [
        np.bincount(
            np.searchsorted(ends, np.concatenate(batches[begin:end]), side="right"), minlength=len(counts)
        )
        for begin, end in itertools.pairwise([0, *groups.tolist()])
    ]
    return tuple(tuple(of_stream) for of_stream in np.array(found).T.tolist())


def _mix_series(schedule: MixSchedule, least: int) -> MixSeries:
    """Return the mix over at least `least` samples, and a quarter beyond the last phase's first sample."""
    last = max(least, schedule.phases[-1].start * 5 // 4)
    even = np.linspace(0, last, MOST_POINTS + 1).round().astype(np.int64)
    positions = np.unique([*even, *(phase.start for phase in schedule.phases)]).tolist()
    counts = np.array([_native.mix_counts(schedule.native(), position) for position in positions])
    return MixSeries(
        positions=tuple(positions[1:]),
        stream_samples=tuple(tuple(of_stream) for of_stream in np.diff(counts, axis=0).T.tolist()),
        phases=tuple(
            (phase.start, dict(zip(schedule.names, phase.weights, strict=True))) for phase in schedule.phases
        ),
    )


def _parts(
    order: _native.EpochOrder, batch: int, cluster: Cluster, ids: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Split the samples of a batch by node; consecutive ranks read consecutive parts."""
    world_size = cluster.num_nodes * cluster.ranks_per_node
    counts = [order.share(batch, rank, world_size)[0] for rank in range(world_size)]
    ends = np.cumsum(counts)[cluster.ranks_per_node - 1 :: cluster.ranks_per_node]
    return np.split(ids, ends[:-1])


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
