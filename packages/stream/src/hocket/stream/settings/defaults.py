"""Default values that several signatures share."""

from __future__ import annotations

import math

#: Seed of permutations and sampling; the default of mosaicml-streaming, so that its runs can be resumed.
SHUFFLE_SEED = 9176

#: Number of samples in a shuffle block.
SHUFFLE_BLOCK_SIZE = 1 << 18

#: Upper bound of the default of `num_canonical_nodes`. A shuffled batch is drawn from gcd(global batch size,
#: this) lanes.
MAX_CANONICAL_NODES = 64

#: Maximum bytes of shards fetched ahead of their first use.
PREFETCH_BYTES = 256 << 20

#: Maximum number of finished batches in the queue.
PREFETCH_BATCHES = 4

#: Number of shards fetched concurrently.
FETCH_THREADS = 16

#: Seconds for all attempts of one request together.
DOWNLOAD_TIMEOUT_S = 120.0

#: Number of times a shard is fetched before wrong bytes raise an error.
DOWNLOAD_RETRY = 3

#: Digests that writers compute for each shard.
HASHES = ("xxh3_64",)

#: Maximum size of a raw shard.
SIZE_LIMIT = "64mb"


def resolve_canonical_nodes(given: int | None, *, global_batch_size: int, shuffle: bool) -> int:
    """Return `num_canonical_nodes`, or its default: storage order without shuffling."""
    if given is not None:
        return given
    return math.gcd(global_batch_size, MAX_CANONICAL_NODES) if shuffle else 1
