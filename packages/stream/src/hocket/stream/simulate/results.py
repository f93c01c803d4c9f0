"""The results of a simulation."""

from __future__ import annotations

from dataclasses import dataclass


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
class StreamUse:
    """The samples of one stream in the simulated batches."""

    name: str

    num_samples: int
    """Number of samples in the stream."""

    num_read: int
    """Number of samples that were read, counting a sample again if it comes again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSeries:
    """The simulated batches in groups of about equal size, for pictures."""

    batches: tuple[int, ...]
    """The batch after the last one of each group."""

    fetched_bytes: tuple[tuple[int, ...], ...]
    """Stored bytes that each node fetches in each group."""

    cache_bytes: tuple[tuple[int, ...], ...]
    """Raw bytes in the cache of each node after each group."""

    stream_samples: tuple[tuple[int, ...], ...]
    """Samples of each stream in each group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixSeries:
    """The streams' samples over the whole schedule of weights."""

    positions: tuple[int, ...]
    """Samples of the run, counted over all ranks and epochs, at the ends of parts of it."""

    stream_samples: tuple[tuple[int, ...], ...]
    """Samples of each stream in each part."""

    phases: tuple[tuple[int, dict[str, float]], ...]
    """First sample and weights of each phase."""


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

    streams: tuple[StreamUse, ...]

    shards_per_batch: float
    """Mean number of distinct shards in a global batch."""

    uniform_shards_per_batch: float
    """Expected number for a batch drawn uniformly from the data set."""

    neighbour_distance: float | None
    """Mean distance in the order between neighbours in a shard: 1 for a uniform permutation of the data
    set, 0 for storage order. None unless the whole epoch was simulated, and has each sample once."""

    series: SimulationSeries

    mix: MixSeries | None
    """The mix over its schedule; None without `weights`."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole epoch was simulated."""
        return self.batches_seen == self.num_batches
