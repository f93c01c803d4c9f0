"""The time to name the samples of a step, with 10^8 samples in 4,000 shards and a checkpoint.

uv run python tests/bench/stream_samples.py
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from hocket.ckpt.torch import CheckpointStore
from hocket.recipes.samples import samples_of
from hocket.stream import MDSWriter, StreamingDataset

SAMPLES, SHARD = 10**8, 25_000
STEP, RANKS, BATCH = 150_000, 64, 1024


def write_index(folder: Path) -> Path:
    """Write the index of a data set whose shards do not exist: no sample is read."""
    with MDSWriter(columns={"id": "int"}, out=folder / "one") as writer:
        writer.write({"id": 0})
    (shard,) = json.loads((folder / "one" / "index.json").read_text())["shards"]
    shards = [
        {**shard, "samples": SHARD, "raw_data": {**shard["raw_data"], "basename": f"shard.{number:05}.mds"}}
        for number in range(SAMPLES // SHARD)
    ]
    large = folder / "large"
    large.mkdir()
    (large / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return large


def main() -> None:
    """Print the median of 20 calls, for the whole batch and for one rank."""
    with tempfile.TemporaryDirectory() as root:
        data = write_index(Path(root))
        dataset = StreamingDataset(local=data, global_batch_size=BATCH, shuffle=True)
        dataset.cursor.go(1, 40_000)
        step = dataset.num_batches + 40_000
        store = CheckpointStore(Path(root) / "run")
        state = {"loader": dataset.state_dict(), "timestamp": {"batch": step}}
        store.save(state, step=step)
        store.close()
        for rank in (None, 7):
            seconds = []
            for _ in range(20):
                start = time.perf_counter()
                found = samples_of(Path(root) / "run", STEP, data=[data], rank=rank, num_ranks=RANKS)
                seconds.append(time.perf_counter() - start)
            what = "all ranks" if rank is None else f"rank {rank} of {RANKS}"
            print(
                f"{what}: {len(found.samples)} samples of step {STEP:,} in "
                f"{1000 * statistics.median(seconds):.0f} ms ({1000 * min(seconds):.0f} to "
                f"{1000 * max(seconds):.0f}), load {os.getloadavg()[0]:.1f}"
            )


if __name__ == "__main__":
    main()
