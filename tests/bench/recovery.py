"""The time from the death of a rank to the next trained step, on two ranks of one machine.

`python tests/bench/recovery.py` takes about five minutes on two quiet cores. In each job rank 1 dies again
and again, each time two steps after a checkpoint, and all ranks start again from it: with `hocket-launch`,
whose ranks are forks of a process that has imported torch; with `hocket-launch --cold`; with the same script
under `torchrun`; and with a script of Lightning under `torchrun`. The figure is the time from the kill to the
end of the first step after it. For Hocket the phases that the launcher and rank 0 print are listed, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from dist import end, python_of

CELL = Path(__file__).parent / "cells" / "recovery.py"
HOCKET = ["-m", "hocket.dist.launch", "-n", "2", "--max-restarts"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts"]
SYSTEMS: dict[str, tuple[list[str], list[str], str, list[str] | None]] = {
    "hocket-launch": (HOCKET, [], "hocket", None),
    "hocket-launch --cold": (HOCKET, ["--cold"], "hocket", None),
    "torchrun, hocket": (TORCHRUN, [], "hocket", None),
    "torchrun, lightning": (TORCHRUN, [], "lightning", ["lightning>=2.6"]),
}
"""The launcher and its further options, the script's system, and the packages of a peer's environment."""
PHASES = re.compile(r"seconds since the launcher found a failed rank: (.*)")
TIMEOUT_S = 180
"""The longest time of a job; one of torchrun may wait for a dead rank's address for half an hour."""

Figures = dict[str, list[float]]


def measure(system: str, deaths: int) -> Figures:
    """Run a job whose rank 1 dies a number of times; return the seconds of each phase.

    Raises:
        RuntimeError: The job failed or did not end; the message has the end of what it printed.
    """
    launcher, options, cell, needs = SYSTEMS[system]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        command = [*python_of(needs), *launcher, str(deaths), *options, str(CELL), cell, name, str(deaths)]
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            _, errors = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end(job)
            raise RuntimeError(f"it did not end within {TIMEOUT_S} s") from None
        except BaseException:
            end(job)
            raise
        if job.returncode:
            raise RuntimeError(errors[-2000:])
        figures = _read(Path(name), deaths)
    for line in PHASES.findall(errors):
        for phase in line.split(", "):
            title, _, seconds = phase.rpartition(" ")
            figures.setdefault(f"found to {title}", []).append(float(seconds))
    return figures


def _read(folder: Path, deaths: int) -> Figures:
    """Return the seconds from each death to the end of the next step, and the steps trained again.

    An attempt may fail before its first step; the step then is that of the next one, and a death is missing.
    """
    figures: Figures = {"killed to the next step": [], "steps trained again": []}
    for attempt in range(deaths):
        killed = folder / f"killed-{attempt}"
        later = [folder / f"steps-{number}-0" for number in range(attempt + 1, deaths + 1)]
        first = next((path for path in later if path.exists()), None)
        if not killed.exists() or first is None:
            print(f"death {attempt + 1} of {deaths} is missing: an attempt failed before its first step")
            continue
        step, ended_at = first.read_text().split("\n")[0].split()
        figures["killed to the next step"].append(float(ended_at) - float(killed.read_text()))
        figures["steps trained again"].append(10 * attempt + 7 - int(step) + 1)
    return figures


def show(figures: dict[str, Figures]) -> None:
    """Print median, least and most of every phase."""
    print("\n| system | phase | median, s | least | most | n |\n|---|---|---|---|---|---|")
    for system, row in figures.items():
        for phase, values in row.items():
            spread = f"{min(values):.2f} | {max(values):.2f} | {len(values)}"
            print(f"| {system} | {phase} | {statistics.median(values):.2f} | {spread} |")


def main() -> None:
    """Measure all systems, round by round, and print the table."""
    # Otherwise a time limit from outside would end this process but not the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=5, help="in each job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    figures: dict[str, Figures] = {}
    failed: dict[str, list[str]] = {}
    loads = [os.getloadavg()[0]]
    for _ in range(options.rounds):
        for system in options.systems:
            try:
                for phase, values in measure(system, options.deaths).items():
                    figures.setdefault(system, {}).setdefault(phase, []).extend(values)
            except RuntimeError as error:
                failed.setdefault(system, []).append(str(error))
            loads.append(os.getloadavg()[0])
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, load ", end="")
    print(", ".join(f"{load:.1f}" for load in loads))
    show(figures)
    for system, messages in failed.items():
        print(f"\n{system}: {len(messages)} of {options.rounds} jobs failed, the last one so: {messages[-1]}")


if __name__ == "__main__":
    main()
