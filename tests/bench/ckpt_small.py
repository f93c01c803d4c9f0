"""The part `small` of `tests/bench/ckpt.py`: 20,000 tensors, for the cost per tensor."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from harness import Table, run_cell

CELL = Path(__file__).parent / "cells" / "checkpoint.py"
SYSTEMS = ["hocket", "safetensors"]
INSPECT = [sys.executable, "-m", "hocket.ckpt", "inspect"]
TIMEOUT_S = 120


def measure(folder: Path, rounds: int) -> list[Table]:
    """Measure saving, loading and `hocket-ckpt inspect`, by the clock and by processor time."""
    clock = Table("20,000 tensors, 0.4 GB", "seconds", is_less_better=True)
    cpu = Table("20,000 tensors, 0.4 GB", "seconds of processor time", is_less_better=True)
    for _ in range(rounds):
        for system in SYSTEMS:
            place = folder / f"small-{system}"
            for phase in ("save", "load"):
                figures = run_cell(CELL, None, phase, system, "small", str(place))
                clock.add(system, phase, figures["seconds"])
                cpu.add(system, phase, figures["cpu_s"])
        for name, extra in (("inspect", []), ("inspect --json", ["--json"])):
            cpu.add("hocket", name, _inspect(folder / "small-hocket" / "checkpoint", extra))
    return [clock, cpu]


def _inspect(place: Path, extra: list[str]) -> float:
    """Return the processor seconds of the command over a saved checkpoint."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*INSPECT, str(place), *extra], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
