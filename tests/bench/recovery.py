"""The time from the death of a rank to the next trained step, on two ranks of one machine.

`python tests/bench/recovery.py` takes about five minutes on two quiet cores. In each job rank 1 dies again
and again, each time two steps after a checkpoint, and all ranks start again from it: with `hocket-launch`,
whose ranks are forks of a process that has imported torch; with `hocket-launch --cold`; with the same script
under `torchrun`; and with a script of Lightning under `torchrun`. The figure is the time from the kill to the
end of the first step after it. For Hocket the phases that the launcher and rank 0 print are listed, too.

`--copies MIB` measures copies in memory instead (`checkpointing={"ephemeral": "1ba"}`), with MIB of state on
each of two ranks: the stall of each copy beside a plain copy of the same bytes to allocated memory, in turns,
and the time that a restart takes to load the copy.

`--results FILE` adds the tables to a file, with the command and the load.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from dist import end, python_of

CELL = Path(__file__).parent / "cells" / "recovery.py"
COPIES_CELL = CELL.with_name("memory_copy.py")
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
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torch's own variable, set for torchrun: each attempt has a store of its own.

Without it ranks of `--standalone` may find the addresses of the attempt before in the store, and fail after 4
attempts to connect to them. Hocket puts the number of the attempt into its keys.
"""
START_S, DEATH_S = 90, 60
"""The longest time of a job: for its start, and for each death. torchrun gives ranks 30 s to end."""

Figures = dict[str, list[float]]


def measure(system: str, deaths: int) -> Figures:
    """Run a job whose rank 1 dies a number of times; return the seconds of each phase.

    Raises:
        RuntimeError: The job failed or did not end; the message has the end of what it printed.
    """
    launcher, options, cell, needs = SYSTEMS[system]
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        command = [*python_of(needs), *launcher, str(deaths), *options, str(CELL), cell, name, str(deaths)]
        env = NEW_STORES if launcher is TORCHRUN else {}
        errors = _run(command, env, timeout_s=START_S + DEATH_S * deaths)
        figures = _read(Path(name), deaths)
    return figures | _phases(errors)


def measure_copies(mib: int, copies: int) -> Figures:
    """Run a job that copies its state to memory and goes on from the last copy; return the seconds of each.

    Raises:
        RuntimeError: The job failed or did not end; the message has the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        command = [*python_of(None), *HOCKET, "1", str(COPIES_CELL), name, str(mib), str(copies)]
        errors = _run(command, {}, timeout_s=START_S + DEATH_S * copies)
        found = json.loads((Path(name) / "figures").read_text())
    # The first two copies make a rank's two files, whose pages the later ones fill again.
    stalls, plain = found["stall"][2:], found["plain"][2:]
    phases = _phases(errors)
    loaded, joined = phases["found to loaded"], phases["found to joined"]
    return {
        f"stall of a copy of {found['bytes'] / 1e6:.0f} MB a rank": stalls,
        "plain copy of the same bytes": plain,
        "stall ÷ plain copy": [one / other for one, other in zip(stalls, plain, strict=True)],
        "restart: from joined to loaded": [loaded[0] - joined[0]],
    }


def _run(command: list[str], env: dict[str, str], *, timeout_s: float) -> str:
    """Run a job to its good end; return what it wrote to standard error."""
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env},
        start_new_session=True,
    )
    try:
        _, errors = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end(job)
        raise RuntimeError(f"it did not end within {timeout_s:g} s") from None
    except BaseException:
        end(job)
        raise
    if job.returncode:
        raise RuntimeError(errors[-2000:])
    return errors


def _phases(errors: str) -> Figures:
    """Return the phases of each restart, in seconds since the launcher found the failed rank."""
    figures: Figures = {}
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
    parser.add_argument("--copies", type=int, metavar="MIB", help="measure copies in memory instead")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add the tables to it")
    options = parser.parse_args()
    jobs: dict[str, Callable[[], Figures]] = {
        system: functools.partial(measure, system, options.deaths) for system in options.systems
    }
    if options.copies is not None:
        jobs = {"ephemeral": functools.partial(measure_copies, options.copies, 1 + options.deaths)}
    figures: dict[str, Figures] = {}
    failed: dict[str, list[str]] = {}
    loads = [os.getloadavg()[0]]
    for _ in range(options.rounds):
        for system, job in jobs.items():
            try:
                for phase, values in job().items():
                    figures.setdefault(system, {}).setdefault(phase, []).extend(values)
            except RuntimeError as error:
                failed.setdefault(system, []).append(str(error))
            loads.append(os.getloadavg()[0])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, load ", end="")
        print(", ".join(f"{load:.1f}" for load in loads))
        show(figures)
        for system, messages in failed.items():
            print(f"\n{system}: {len(messages)} of {options.rounds} jobs failed, at last so: {messages[-1]}")
    print(output.getvalue(), end="")
    if options.results is not None:
        command = " ".join(["python", "tests/bench/recovery.py", *map(shlex.quote, sys.argv[1:])])
        with options.results.open("a") as file:
            file.write(f"\n`{command}`: {output.getvalue()}")


if __name__ == "__main__":
    main()
