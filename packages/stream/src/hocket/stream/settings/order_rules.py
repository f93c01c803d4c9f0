"""The arguments of an order of samples that do not depend on the data or the batch size."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hocket.stream.settings.defaults import SHUFFLE_SEED


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRules:
    """The arguments that the native order and that of mosaicml-streaming have in common."""

    num_canonical_nodes: int | None = None
    """Number of lanes that each batch is drawn from; None for the order's default."""

    shuffle: bool = False
    """Whether shards, and samples within blocks, are permuted."""

    shuffle_seed: int = SHUFFLE_SEED
    """Seed of the permutations and of the sampling."""

    shuffle_block_size: int | None = None
    """Number of samples in a shuffle block; None for the order's default."""

    tail: str = "short"
    """Policy for the last batch: `short`, `drop` or `pad`."""

    batching_method: str = "random"
    """Policy for mixing streams in batches: `random`, `stratified`, `per_stream` or `device_per_stream`."""

    sampling_method: str = "balanced"
    """Whether a partly used stream is sampled again in each epoch (`balanced`) or once (`fixed`)."""

    sampling_granularity: int = 1
    """Number of samples drawn from one shard at a time if a stream is used in part."""

    def rules(self) -> dict[str, Any]:
        """Return the values of this class's fields by name, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(OrderRules)}
