"""The cost of a snapshot at each step in torchdata's StatefulDataLoader, with steps of 1 ms.

The same epochs with a snapshot at each step and with none, interleaved in rounds. Run it with
`uv run python tests/bench/stateful_loader.py`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from torchdata.stateful_dataloader import StatefulDataLoader

from hocket.stream import MDSWriter, StreamingDataset

BATCH = 16
STEP_S = 1e-3


def write(folder: Path, num_steps: int) -> None:
    """Write tokens for a number of steps, 4 KiB a sample."""
    with MDSWriter(columns={"tokens": "ndarray:uint16:2048"}, out=folder) as writer:
        for number in range(num_steps * BATCH):
            writer.write({"tokens": np.full(2048, number % 65536, np.uint16)})


def epoch(folder: Path, *, workers: int, every: int) -> float:
    """Return the seconds of the median step without the first ones; the step's own work is a sleep."""
    dataset = StreamingDataset(local=folder, batch_size=BATCH, shuffle=True)
    loader = StatefulDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, snapshot_every_n_steps=every, collate_fn=list
    )
    times = []
    for _ in loader:
        times.append(time.perf_counter())
        while time.perf_counter() < times[-1] + STEP_S:
            pass
    return float(np.median(np.diff(times[20:])))


def main() -> None:
    """Print medians and the overhead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.steps)
        for workers in (0, 1):
            measured: dict[int, list[float]] = {1: [], 1 << 40: []}
            for _ in range(options.rounds):
                for every, times in measured.items():
                    times.append(1e6 * epoch(Path(folder), workers=workers, every=every))
            with_, without = (statistics.median(times) for times in measured.values())
            spread = ", ".join(f"{min(times):.0f}..{max(times):.0f}" for times in measured.values())
            print(
                f"{workers} workers: {with_:.0f} us a step with a snapshot at each, {without:.0f} with none "
                f"[{spread}]: {100 * (with_ / without - 1):+.2f}%"
            )


if __name__ == "__main__":
    main()
