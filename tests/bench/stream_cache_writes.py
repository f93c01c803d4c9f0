"""The cost of the cache's writes: processor time of a cold epoch from S3 with and without keeping shards.

Run it with `uv run python tests/bench/stream_cache_writes.py`, or under `strace -f -c` for the calls.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

SAMPLES, ROUNDS = 20_000, 3


def read(uri: str, cache: str, kind: str) -> None:
    """Read an epoch and print its processor time."""
    from hocket.stream import StreamingDataset

    dataset = StreamingDataset(
        remote=uri, local=cache, batch_size=64, shuffle=True, keep_shards=kind == "kept"
    )
    before = resource.getrusage(resource.RUSAGE_SELF)
    count = sum(len(batch["tokens"]) for batch in dataset.batches())
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    print(f"{kind}: {user:.3f} s in user mode, {system:.3f} s in system mode for {count * 4096 / 1e6:.0f} MB")


def main() -> None:
    """Write a data set to a store, and read it in fresh processes."""
    import numpy as np

    from hocket.stream import MDSWriter

    with Server() as server:
        os.environ.update(server.env)
        uri = server.uri("tokens")
        with MDSWriter(columns={"tokens": "ndarray:uint16:2048"}, out=uri, hashes=None) as writer:
            for number in range(SAMPLES):
                writer.write({"tokens": np.full(2048, number, np.uint16)})
        for _ in range(ROUNDS):
            for kind in ("kept", "unkept"):
                with tempfile.TemporaryDirectory() as cache:
                    subprocess.run([sys.executable, __file__, uri, cache, kind], timeout=300, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        read(*sys.argv[1:])
    else:
        main()
