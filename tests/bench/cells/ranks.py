"""One cell of `tests/bench/ckpt_ranks.py`: several ranks save or load one state, each tensor cut on dim 0.

Started without `RANK`, the script starts the ranks, over gloo, and prints one JSON object: the time of the
slowest rank and the memory of the largest. Saves and loads are those of `checkpoint.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import torch
from states import SHAPES, State, forget_peak, make_state, num_bytes, peak_kib, warm_memory
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

TIMEOUT_S = 600


def cut(state: State, mesh: DeviceMesh) -> State:
    """Return this rank's shards, in memory of their own; tensors without dims are replicated."""
    cut_state: State = {}
    for name, value in state.items():
        if value.ndim:
            local, placement = value.chunk(mesh.size())[mesh.get_local_rank()].clone(), Shard(0)
        else:
            local, placement = value.clone(), Replicate()
        cut_state[name] = DTensor.from_local(local, mesh, [placement], run_check=False)
    return cut_state


def local(value: torch.Tensor) -> torch.Tensor:
    """Return some of the shard's values."""
    assert isinstance(value, DTensor)
    return value.to_local().view(-1)[::17]


def fresh(folder: Path) -> None:
    """Empty the folder, on one rank."""
    if distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.sync()
    distributed.barrier()


def run(options: argparse.Namespace) -> dict[str, float]:
    """Run the cell on one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    kind = "_s3" if options.uri else ""
    act: Callable[[State, Any], None] = getattr(checkpoint, f"{options.phase}_{options.system}{kind}")
    whole = make_state(options.shape)
    state, size = cut(whole, mesh), num_bytes(whole)
    del whole
    # A first, small save is not measured, nor a small load: they include imports and the start of threads.
    small = cut({"a": torch.ones(4)}, mesh)
    if options.uri:
        getattr(checkpoint, f"save_{options.system}_s3")(small, f"{options.uri}-warm-{options.phase}")
        getattr(checkpoint, f"load_{options.system}_s3")(small, f"{options.uri}-warm-{options.phase}")
    elif options.phase == "save":
        fresh(options.folder)
        act(small, options.folder)
        distributed.barrier()
        fresh(options.folder)
    target = state
    if options.phase == "load":
        target = {
            name: DTensor.from_local(
                torch.zeros_like(value.to_local()), mesh, value.placements, run_check=False
            )
            for name, value in state.items()
            if isinstance(value, DTensor)
        }
        if not options.uri:
            for path in options.folder.rglob("*"):
                if path.is_file():
                    path.read_bytes()
    warm_memory()
    forget_peak()
    before = peak_kib()
    distributed.barrier()
    start = time.perf_counter()
    act(target, options.uri or options.folder)
    seconds = time.perf_counter() - start
    grown = peak_kib() - before
    for name, value in state.items():
        if not torch.equal(local(value), local(target[name])):
            raise SystemExit(f"{name} is not what was saved")
    distributed.barrier()
    return {"seconds": seconds, "gb_s": size / seconds / 1e9, "extra_mib": grown / 1024}


def launch(num_ranks: int) -> dict[str, float]:
    """Start the ranks with this program's arguments, and wait for all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    figures = [json.loads(text.splitlines()[-1]) for text in outputs]
    best = {"gb_s": min}
    return {name: best.get(name, max)(each[name] for each in figures) for name in figures[0]}


def main() -> None:
    """Run one cell, or one rank of it, and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["save", "load"])
    parser.add_argument("system")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--uri", help="a prefix on an S3 server instead of the folder")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    figures = run(options) if "RANK" in os.environ else launch(options.ranks)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
