"""The cluster that a simulation is of."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.stream.errors import ConfigError
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
