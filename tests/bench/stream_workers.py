"""The processor time of a batch from a DataLoader with workers, in the parent and in the workers.

Measures processor time, which other programs on the machine change little. `--profile` prints the parent's
functions by their own time. Run it with `uv run python tests/bench/stream_workers.py`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
from pathlib import Path

import numpy as np

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset

SAMPLES, TOKENS = 20_000, 2048


def times(who: int) -> float:
    """Return the seconds of processor time of `resource.getrusage(who)`."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Write samples of 4 KiB once, read an epoch to warm up, and measure the next."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench-stream-workers"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not (options.out / "index.json").exists():
        rng = np.random.default_rng(0)
        with MDSWriter(columns={"tokens": f"ndarray:uint16:{TOKENS}"}, out=options.out) as writer:
            for _ in range(SAMPLES):
                writer.write({"tokens": rng.integers(0, 1 << 16, TOKENS, dtype=np.uint16)})
    dataset = StreamingDataset(local=options.out, batch_size=options.batch, shuffle=True)
    loader = StreamingDataLoader(dataset, num_workers=options.workers)
    for _ in loader:
        pass
    processes = {"parent": resource.RUSAGE_SELF, "workers": resource.RUSAGE_CHILDREN}
    before = {name: times(who) for name, who in processes.items()}
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    count = sum(1 for _ in loader)
    profile.disable()
    for name, who in processes.items():
        print(f"{name}: {(times(who) - before[name]) / count * 1e3:.3f} ms of processor time a batch")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
