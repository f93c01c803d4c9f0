"""Defaults that more than one signature has."""

from __future__ import annotations

#: Of permutations and draws; mosaicml-streaming's, so that a run that gives none goes on alike.
SHUFFLE_SEED = 9176

#: Samples of a block.
SHUFFLE_BLOCK_SIZE = 1 << 18

#: Lanes that a shuffled batch is drawn from: the greatest common divisor of the batch and this.
MOST_LANES = 64

#: Bytes of shards that may be fetched ahead of their first use.
PREFETCH_BYTES = 256 << 20

#: Finished batches that may wait.
PREFETCH_BATCHES = 4

#: Shards that are fetched at once.
FETCH_THREADS = 16

#: Seconds that all tries of one request may take together.
DOWNLOAD_TIMEOUT_S = 120.0

#: Fetches of a shard before wrong bytes are final.
DOWNLOAD_ATTEMPTS = 3

#: Bytes of a raw shard.
SIZE_LIMIT = "64mb"
