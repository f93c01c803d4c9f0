"""A training step over FSDP2 on two gloo ranks: Hocket, Lightning and Accelerate beside a bare loop.

`uv run python tests/bench/dist.py --rounds 3`. Each system runs in a process group of its own and alternates
there with a bare loop over the same model and batches, so that a change of the machine's speed meets both;
the figure is the ratio of the two in each round. Peers run in an environment of their own with the same
version of torch, each as its documentation recommends. A system that cannot shard on the CPU is reported with
its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import torch
from harness import Table

CELL = Path(__file__).parent / "cells" / "sharded_step.py"
VERSION = torch.__version__.partition("+")[0]
SYSTEMS: dict[str, list[str] | None] = {
    "bare": None,
    "hocket": None,
    "hocket_dist": None,
    "lightning": ["lightning>=2.6"],
    "accelerate": ["accelerate>=1.10"],
}
TIMEOUT_S = 400


def run_ranks(system: str, mode: str) -> dict[str, float]:
    """Run a cell on two ranks and return what rank 0 printed.

    Raises:
        RuntimeError: The system failed; the message has its own reason.
    """
    command = [sys.executable]
    if (needs := SYSTEMS[system]) is not None:
        command = [
            "uv",
            "run",
            "--quiet",
            "--no-project",
            "--python",
            sys.executable,
            "--with",
            f"torch=={VERSION}",
        ]
        for need in needs:
            command += ["--with", need]
        command.append("python")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [*command, *launch, str(CELL), system, mode],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=env,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error:" in line]
        raise RuntimeError(errors[0] if errors else done.stderr[-500:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(
        system, mode, {name: round(value, 3) for name, value in figures.items()}, file=sys.stderr, flush=True
    )
    return figures


def main() -> None:
    """Measure all systems, rounds outside, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ratio = Table("Step time", "÷ bare loop in the same process", is_less_better=True)
    step = Table("Step time", "ms", is_less_better=True)
    memory = Table("Peak memory of a rank beyond the start", "MiB", limits=["bare"], is_less_better=True)
    refused: dict[str, str] = {}
    for _ in range(options.rounds):
        for system in SYSTEMS:
            if system in refused:
                continue
            try:
                found = run_ranks(system, "time")
                ratio.add(system, "step", found["ratio"])
                step.add(system, "step", found["step_ms"])
                memory.add(system, "peak", run_ranks(system, "memory")["peak_mib"])
            except RuntimeError as error:
                refused[system] = str(error)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    for table in (ratio, step, memory):
        table.show()
    for system, why in refused.items():
        print(f"{system} did not run: {why}")


if __name__ == "__main__":
    main()
