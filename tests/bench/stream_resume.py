"""Time to the first batch, and memory, of a start and of a resume at 99% of an epoch of 10^8 samples.

    python tests/bench/stream_resume.py [--samples 100000000] [--rounds 5]

The data set is one real shard under all names of the index, so that batches are really read. Every
measurement is a process of its own; starts and resumes alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARD_SAMPLES = 16_384
BATCH = 1024


def write(folder: Path, samples: int) -> None:
    """Write a data set of `samples` one-byte samples."""
    from hocket.stream import MDSWriter

    with MDSWriter(columns={"x": "uint8"}, out=folder, size_limit=None) as writer:
        for number in range(SHARD_SAMPLES):
            writer.write({"x": number % 256})
    index = json.loads((folder / "index.json").read_text())
    (shard,) = index["shards"]
    first = folder / shard["raw_data"]["basename"]
    index["shards"] = []
    for number in range(-(-samples // SHARD_SAMPLES)):
        name = f"copy.{number:05d}.mds"
        os.link(first, folder / name)
        index["shards"].append(shard | {"raw_data": shard["raw_data"] | {"basename": name}})
    (folder / "index.json").write_text(json.dumps(index))


def measure(folder: str, part: float) -> dict[str, float]:
    """Open the data set at a part of its epoch and read a batch; return seconds and MiB above imports."""
    import resource

    from hocket.stream import StreamingDataset

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    dataset = StreamingDataset(local=folder, global_batch_size=BATCH, shuffle=True)
    opened = time.perf_counter()
    state = dataset.state_dict() | {"batch": int(dataset.num_batches * part)}
    dataset.load_state_dict(state)
    batch = next(dataset.batches())
    first = time.perf_counter()
    assert len(batch["x"]) == BATCH
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"open_s": opened - begin, "first_batch_s": first - opened, "mib": (peak - before) / 1024}


def main() -> None:
    """Print medians and spread of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], float(args.measure[1]))))
        return
    measured: dict[float, list[dict[str, float]]] = {0.0: [], 0.99: []}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.samples)
        for _ in range(args.rounds):
            for part, results in measured.items():
                command = [sys.executable, __file__, "--measure", folder, str(part)]
                completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
                results.append(json.loads(completed.stdout))
    print(f"{args.samples:,} samples, batches of {BATCH}, {args.rounds} rounds: median (least to most)")
    for name in ("open_s", "first_batch_s", "mib"):
        cells = []
        for part, results in measured.items():
            values = [result[name] for result in results]
            cells.append(
                f"at {part:.0%}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            )
        start, late = (statistics.median(result[name] for result in results) for results in measured.values())
        print(f"{name:>14}  {'   '.join(cells)}   ratio {late / start:.2f}")


if __name__ == "__main__":
    main()
