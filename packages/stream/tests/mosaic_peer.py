"""The part of `test_mosaic_parity.py` that runs mosaicml-streaming: `python mosaic_peer.py CASES ANSWERS`.

Writes, for each case, either the samples of every rank's batches, or the batches of a loader that is stopped
and resumed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import streaming
from streaming.base.batching import generate_work
from streaming.base.util import clean_stale_shared_memory
from streaming.base.world import World


def make(case: dict[str, Any]) -> Any:
    streams = [streaming.Stream(**stream) for stream in case["streams"]]
    return streaming.StreamingDataset(streams=streams, batch_size=case["batch_size"], **case["options"])


def plan(case: dict[str, Any]) -> list[list[list[int]]] | None:
    """Return each rank's batches as a DataLoader orders them, or None if the case is refused."""
    dataset = make(case)
    state = case["state"]
    dataset.num_canonical_nodes = state["num_canonical_nodes"]
    dataset.initial_physical_nodes = state["initial_physical_nodes"]
    world = World(case["nodes"], case["ranks"], case["workers"], 0)
    try:
        work = generate_work(
            dataset.batching_method, dataset, world, state["epoch"], state["sample_in_epoch"]
        )
    except ValueError:
        return None
    work = work.transpose(0, 1, 3, 2, 4).reshape(case["nodes"] * case["ranks"], -1, case["batch_size"])
    return [[[i for i in batch if i >= 0] for batch in rank] for rank in work.tolist()]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's samples up to a stop, its state there, and the rest of the epoch."""
    dataset = make(case)
    loader = streaming.StreamingDataLoader(dataset, batch_size=case["batch_size"])
    batches = iter(loader)
    done = [next(batches)["id"].tolist() for _ in range(case["stop"])]
    state = loader.state_dict()
    return {"done": done, "state": state, "rest": [batch["id"].tolist() for batch in batches]}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    answers = []
    for case in cases:
        clean_stale_shared_memory()
        answers.append(run(case) if "stop" in case else plan(case))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
