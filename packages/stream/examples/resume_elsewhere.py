"""Stop on four ranks in the middle of an epoch, go on with two, and see that no sample is lost or repeated.

Run it with `python resume_elsewhere.py`; ranks are simulated one after another in this process.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np

from hocket.stream import MDSWriter, StreamingDataset

COUNT, BATCH = 1000, 64


def write(folder: str) -> None:
    """Write numbered samples into shards of about 16 KiB."""
    with MDSWriter(
        columns={"id": "int", "tokens": "ndarray:uint16:32"}, out=folder, size_limit="16kb"
    ) as writer:
        for number in range(COUNT):
            writer.write({"id": number, "tokens": np.full(32, number, np.uint16)})


def run(
    folder: str, *, world_size: int, state: dict[str, Any] | None, steps: int | None
) -> tuple[list[int], dict[str, Any]]:
    """Read so many global batches, or to the epoch's end, on all ranks; return samples and state."""
    batches: dict[int, list[int]] = {}
    after: dict[str, Any] = {}
    for rank in range(world_size):
        dataset = StreamingDataset(
            local=folder, global_batch_size=BATCH, shuffle=True, rank=rank, world_size=world_size
        )
        if state is not None:
            dataset.load_state_dict(state)
        for step, batch in enumerate(dataset.batches(), start=1):
            local, _ = dataset.batch_share()
            batches.setdefault(step, []).extend(batch["id"][:local].tolist())
            after = dataset.state_dict()
            if step == steps:
                break
    return [number for step in sorted(batches) for number in batches[step]], after


def main() -> None:
    """Compare an interrupted epoch with an uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        whole, _ = run(folder, world_size=1, state=None, steps=None)
        first, state = run(folder, world_size=4, state=None, steps=7)
        rest, _ = run(folder, world_size=2, state=state, steps=None)
    print("saved state:", json.dumps(state))
    print(f"{len(first)} samples on 4 ranks, then {len(rest)} on 2")
    print("same order as without the stop:", first + rest == whole)


if __name__ == "__main__":
    main()
