"""One cell of `tests/bench/stream_lance.py`: rows of a Lance data set in a shuffled order, read by one rank.

Runs in an environment with pylance, and imports nothing of this repository. Prints one JSON object. The order
is that of a shuffled epoch: blocks of rows in storage order, permuted within each block, in batches of which
each rank takes a contiguous part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

COLUMNS = ["id", "tokens", "text"]
BATCH, ROWS_PER_FRAGMENT = 256, 25_600
BLOCK = 2 * ROWS_PER_FRAGMENT


def order(count: int) -> np.ndarray:
    """Return the numbers of all rows, permuted within each block."""
    rng = np.random.default_rng(7)
    blocks = np.split(np.arange(count), range(BLOCK, count, BLOCK))
    return np.concatenate([rng.permutation(block) for block in blocks])


def scan(dataset: Any, rank: int, world_size: int, first: int) -> Iterator[Any]:
    """Read in storage order, whole batches in turn over ranks: the limit."""
    batches = dataset.scanner(columns=COLUMNS, batch_size=BATCH).to_batches()
    yield from (batch for number, batch in enumerate(batches) if number % world_size == rank)


def take(dataset: Any, rank: int, world_size: int, first: int) -> Iterator[Any]:
    """Read each rank's rows of a batch by their numbers."""
    ids = order(dataset.count_rows())
    for start in range(first * BATCH, len(ids), BATCH):
        part = np.array_split(ids[start : start + BATCH], world_size)[rank]
        yield dataset.take(part, columns=COLUMNS)


def blocks(dataset: Any, rank: int, world_size: int, first: int) -> Iterator[Any]:
    """Read a block's fragments whole, permute its rows in memory, and take the rank's part of its batches."""
    import pyarrow as pa

    ids, fragments = order(dataset.count_rows()), dataset.get_fragments()
    per_block = BLOCK // ROWS_PER_FRAGMENT
    for start in range(first * BATCH // BLOCK * BLOCK, len(ids), BLOCK):
        number = start // BLOCK * per_block
        tables = [one.to_table(columns=COLUMNS) for one in fragments[number : number + per_block]]
        block = pa.concat_tables(tables).combine_chunks().take(ids[start : start + BLOCK] - start)
        for place in range(max(start, first * BATCH), min(start + BLOCK, len(ids)), BATCH):
            part = np.array_split(np.arange(place, min(place + BATCH, len(ids))), world_size)[rank]
            yield block.slice(part[0] - start, len(part))


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["write", "scan", "take", "blocks"])
    parser.add_argument("place")
    parser.add_argument("--source")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    import lance
    import pyarrow.dataset

    storage = None
    if endpoint := os.environ.get("S3_ENDPOINT_URL"):
        storage = {"endpoint": endpoint, "allow_http": "true"}
    if options.mode == "write":
        source = pyarrow.dataset.dataset(options.source, format="parquet", exclude_invalid_files=True)
        lance.write_dataset(
            source, options.place, max_rows_per_file=ROWS_PER_FRAGMENT, storage_options=storage
        )
        print(json.dumps({}), flush=True)
        return
    start = time.perf_counter()
    dataset = lance.dataset(options.place, storage_options=storage if "://" in options.place else None)
    first, rows, taken, digest = 0.0, 0, 0, hashlib.blake2b(digest_size=6)
    for batch in globals()[options.mode](dataset, options.rank, options.world_size, options.first):
        ids = batch["id"].to_numpy(zero_copy_only=False) if hasattr(batch["id"], "to_numpy") else batch["id"]
        digest.update(np.ascontiguousarray(ids).tobytes())
        rows += batch.num_rows
        if not first:
            first, taken = time.perf_counter() - start, rows
        if time.perf_counter() - start > options.seconds:
            break
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "rows": rows,
        "rows_s": (rows - taken) / max(seconds - first, 1e-9),
        "first_batch_s": first,
        "cpu_us_row": (used.ru_utime + used.ru_stime) / rows * 1e6,
        "peak_rss_mib": used.ru_maxrss / 1024,
        "order": int(digest.hexdigest(), 16),
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
