"""A training step over FSDP2 on two gloo ranks: Hocket, Lightning and Accelerate beside a bare loop.

`python tests/bench/dist.py` takes about five minutes on two quiet cores. Each system runs in a process group
of its own and alternates there with a bare loop over the same model and batches, in blocks of four steps, so
that a change of the machine's speed affects both. The figure is the ratio of two neighbouring blocks; the
bare loop compared with itself shows the error. Systems run one after the other, round by round. Peers run in
environments of their own with the same version of torch, each as its documentation recommends. A system that
cannot shard on the CPU is reported with its reason.

`--axis tp`, `cp` or `pp` measures a step over that axis instead, beside the bare loop of
`cells/bare_axes.py`; the peers have no part in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import torch

CELL = Path(__file__).parent / "cells" / "sharded_step.py"
VERSION = torch.__version__.partition("+")[0]
SYSTEMS: dict[str, list[str] | None] = {
    "bare": None,
    "hocket_dist": None,
    "hocket": None,
    "lightning": ["lightning>=2.6"],
    "accelerate": ["accelerate>=1.10"],
}
UNITS = {
    "cpu_ratio": "processor time ÷ bare",
    "wall_ratio": "wall clock ÷ bare",
    "cpu_ms": "processor time, ms",
    "wall_ms": "wall clock, ms",
    "peak_mib": "tensors alive at the peak, MiB",
    "resident_mib": "resident set at the peak beyond the start, MiB",
    "anonymous_mib": "resident set in the end beyond the start, of the process alone, MiB",
    "of_files_mib": "resident set in the end beyond the start, of files, MiB",
    "imported": "modules imported after the start",
}
TIMEOUT_S = 400
GRACE_S = 45
"""Seconds that torch's agent may take to end its ranks: it waits 30 before it kills them."""
Figures = dict[str, list[float]]


def run_ranks(system: str, mode: str, *, model: str, pairs: int, axis: str) -> Figures:
    """Run a cell on two ranks and return what rank 0 printed.

    Raises:
        RuntimeError: The system failed; the message has its own reason.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if mode == "resident":
        # Return large freed blocks to the system at once, so that the resident set has used memory only.
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    arguments = [system, mode, model, str(pairs), axis]
    command = [*python_of(SYSTEMS[system]), *launch, str(CELL), *arguments]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        out, errors = job.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end(job)
        raise RuntimeError(f"it did not end within {TIMEOUT_S} s, and was ended with its ranks") from None
    except BaseException:
        end(job)
        raise
    if job.returncode:
        error_lines = [line for line in errors.splitlines() if "Error:" in line]
        raise RuntimeError(error_lines[0] if error_lines else errors[-500:])
    figures: Figures = json.loads(out.splitlines()[-1])
    shown = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    print(system, mode, shown, file=sys.stderr, flush=True)
    return figures


def end(job: subprocess.Popen[str]) -> None:
    """End the process group of a job, and its ranks.

    The ranks are in sessions of their own, which SIGKILL of the group would not reach: torch's agent ends
    them when it gets SIGTERM. `communicate` returns once all of them have closed their output.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=GRACE_S)
            return


def python_of(needs: list[str] | None) -> list[str]:
    """Return the command of this Python, or of one with a peer's packages and this version of torch."""
    if needs is None:
        return [sys.executable]
    command = ["uv", "run", "--quiet", "--no-project", "--python", sys.executable]
    for need in (f"torch=={VERSION}", *needs):
        command += ["--with", need]
    return [*command, "python"]


def show(figures: dict[str, Figures]) -> None:
    """Print a table for each unit: median, its 95% interval and quartiles of every system."""
    for unit, title in UNITS.items():
        if not any(unit in row for row in figures.values()):
            continue
        print(f"\n| {title} | median | 95% | quartiles | least | n |\n|---|---|---|---|---|---|")
        for system, row in figures.items():
            if values := row.get(unit):
                low, middle, high = quartiles(values)
                least, most = interval_of_median(values)
                spread = f"{least:.4g} – {most:.4g} | {low:.4g} – {high:.4g}"
                print(f"| {system} | {middle:.4g} | {spread} | {min(values):.4g} | {len(values)} |")
    if "bare" in figures:
        for unit in ("peak_mib", "resident_mib"):
            if unit not in figures["bare"]:
                continue
            base = statistics.median(figures["bare"][unit])
            ratios = {
                system: round(statistics.median(row[unit]) / base, 3) for system, row in figures.items()
            }
            print(f"\n{UNITS[unit]} ÷ bare: {ratios}")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Return two of the values between which the median of all blocks lies in 95 of 100 runs."""
    ordered = sorted(values)
    least = max(int(len(values) / 2 - 0.98 * len(values) ** 0.5), 0)
    return ordered[least], ordered[-1 - least]


def main() -> None:
    """Measure all systems, round by round, and print the tables."""
    # Otherwise a time limit from outside would end this process but not the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--modes", nargs="+", choices=["step", "resident"], default=["step", "resident"])
    parser.add_argument("--model", choices=["small", "medium", "large"], default="small")
    parser.add_argument("--axis", choices=["dp_shard", "tp", "cp", "pp"], default="dp_shard")
    parser.add_argument("--pairs", type=int, default=24, help="blocks of each system, beside the bare loop's")
    options = parser.parse_args()
    if options.axis != "dp_shard":
        options.systems = [system for system in options.systems if system in ("bare", "hocket")]
    if not options.systems:
        parser.error(f"`--axis {options.axis}` measures the systems `bare` and `hocket` alone")
    figures: dict[str, Figures] = {}
    refused: dict[str, str] = {}
    loads = [os.getloadavg()[0]]
    for _ in range(options.rounds):
        for system in options.systems:
            for mode in options.modes:
                if system in refused:
                    continue
                try:
                    measured = run_ranks(
                        system, mode, model=options.model, pairs=options.pairs, axis=options.axis
                    )
                    for unit, values in measured.items():
                        figures.setdefault(system, {}).setdefault(unit, []).extend(values)
                except RuntimeError as error:
                    refused[system] = str(error)
        loads.append(os.getloadavg()[0])
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, load ", end="")
    print(", ".join(f"{load:.1f}" for load in loads))
    show(figures)
    for system, message in refused.items():
        print(f"\n{system} did not run: {message}")


if __name__ == "__main__":
    main()
