"""Loads of one checkpoint into memory of several layouts, beside safetensors and torch's own checkpoints.

All systems hold the same 0.8 GB in the page cache. Hocket verifies every block, the others nothing.
safetensors has no load into memory of another layout: `copy_` places what it read. Run it with `uv run python
tests/bench/ckpt_layouts.py`.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from hocket.ckpt.torch.store import CheckpointStore

NUM_TENSORS = 12
ROWS = COLUMNS = 4096

State = dict[str, torch.Tensor]

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "C order": lambda: torch.zeros(ROWS, COLUMNS),
    "columns of wider tensors": lambda: torch.zeros(ROWS, 2 * COLUMNS)[:, 100 : 100 + COLUMNS],
    "transposed": lambda: torch.zeros(COLUMNS, ROWS).t(),
}


def load_hocket(folder: Path, state: State) -> None:
    """Load with verification."""
    CheckpointStore(folder).load("hocket", into=state)


def load_safetensors(folder: Path, state: State) -> None:
    """Load each tensor and copy it into place."""
    with safe_open(folder / "one.safetensors", "pt") as file:
        for name, tensor in state.items():
            tensor.copy_(file.get_tensor(name))


def load_dcp(folder: Path, state: State) -> None:
    """Load with torch's reader, which fills the tensors in place."""
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)


SYSTEMS = {"hocket": load_hocket, "safetensors": load_safetensors, "torch dcp": load_dcp}


def main() -> None:
    """Save once, then measure all systems in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/layouts"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saved = {f"w{number}": torch.randn(ROWS, COLUMNS) for number in range(NUM_TENSORS)}
    CheckpointStore(folder).save(saved, name="hocket", step=1)
    save_file(saved, folder / "one.safetensors")
    dcp.save(saved, checkpoint_id=folder / "dcp", no_dist=True)
    tables = []
    for layout, make in LAYOUTS.items():
        table = Table(f"load of 0.8 GB into {layout}", "seconds", is_less_better=True)
        for number in range(options.rounds + 1):
            for system, load in SYSTEMS.items():
                state = {name: make() for name in saved}
                gc.collect()
                start = time.perf_counter()
                load(folder, state)
                seconds = time.perf_counter() - start
                assert all(torch.equal(state[name], saved[name]) for name in saved), system
                if number:  # the first round warms up
                    table.add(system, "load", seconds)
        tables.append(table)
    for table in tables:
        table.show()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
