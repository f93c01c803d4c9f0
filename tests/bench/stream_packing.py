"""Padding of packed rows by window, beside other ways to make rows, and the rate of `PackedDataset`.

uv run python tests/bench/stream_packing.py
"""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

from hocket.stream import MDSWriter, PackedDataset
from hocket.stream.packing.best_fit import cut_sequences, pack_pieces

SAMPLES, LENGTH, BATCH = 40_000, 2048, 16


def padding(tokens: int, positions: int) -> str:
    """Return the share of positions that are padding."""
    return f"{100 * (1 - tokens / positions):6.2f}%"


def next_fit(lengths: NDArray[np.int64]) -> int:
    """Return the number of rows if a sequence that does not fit into the last row begins another."""
    rows, free = 0, 0
    for length in lengths.tolist():
        if length > free:
            rows, free = rows + 1, LENGTH
        free -= length
    return rows


def main() -> None:
    """Print the padding of each way, and tokens per second for one reader."""
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(5.9, 0.9, SAMPLES), 1, LENGTH).astype(np.int64)
    tokens = int(lengths.sum())
    sizes = f"{lengths.mean():.0f} tokens (median {np.median(lengths):.0f})"
    print(f"{SAMPLES:,} sequences of {sizes} in rows of {LENGTH}")
    longest = [int(part.max()) * len(part) for part in np.split(lengths, range(BATCH, SAMPLES, BATCH))]
    print(f"no packing, each row full length   {padding(tokens, SAMPLES * LENGTH)}")
    print(f"no packing, {BATCH} rows of the longest  {padding(tokens, sum(longest))}")
    print(f"in order, whole sequences          {padding(tokens, next_fit(lengths) * LENGTH)}")
    ends = np.cumsum(lengths)
    num_cut = int(((ends - lengths) // LENGTH != (ends - 1) // LENGTH).sum())
    cut = f"cuts {100 * num_cut / SAMPLES:.1f}% of the sequences"
    print(f"concatenated                       {padding(tokens, -(-tokens // LENGTH) * LENGTH)}, {cut}")
    for window in (16, 64, 256, 1024, 4096):
        start = time.perf_counter()
        parts = np.split(lengths, range(window, SAMPLES, window))
        rows = sum(len(pack_pieces(cut_sequences(part.tolist(), LENGTH), LENGTH)) for part in parts)
        seconds = time.perf_counter() - start
        took = f"{1e6 * seconds / SAMPLES:.1f} µs a sequence"
        print(f"best fit, windows of {window:5}          {padding(tokens, rows * LENGTH)}, {took}")
    with tempfile.TemporaryDirectory() as root:
        with MDSWriter(columns={"tokens": "ndarray:uint16"}, out=f"{root}/data") as writer:
            for length in lengths.tolist():
                writer.write({"tokens": np.ones(length, np.uint16)})
        for rank, num_ranks in ((0, 1), (3, 8)):
            dataset = PackedDataset(
                local=f"{root}/data",
                length=LENGTH,
                batch_size=8,
                shuffle=True,
                rank=rank,
                world_size=num_ranks,
            )
            for _ in dataset.batches():
                pass
            start, before = time.perf_counter(), dataset.num_tokens
            for _ in dataset.batches():
                pass
            rate = (dataset.num_tokens - before) / (time.perf_counter() - start)
            who = f"rank {rank} of {num_ranks}"
            print(f"{who}: {rate / 1e6:,.1f} million tokens/s over all ranks, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
