"""The part `async` of `tests/bench/ckpt.py`: how much a save slows the training that continues meanwhile."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from harness import Table, run_cell

CELL = Path(__file__).parent / "cells" / "stalls.py"
COPY = "memcpy"
DISK = "fio"
#: The packages of each system's environment; None is this one. DCP has three ways to stage the state.
SYSTEMS: dict[str, list[str] | None] = {
    COPY: None,
    **({DISK: None} if shutil.which("fio") else {}),
    "hocket": None,
    "dcp_thread": None,
    "dcp_stager": None,
    "dcp_process": None,
    "torch_checkpointing": ["torch_checkpointing==0.1.1", "torch"],
}


def measure(folder: Path, shapes: list[str], rounds: int) -> list[Table]:
    """Measure asynchronous saves; a cell's figure is the median of its saves after the first."""
    tables = {
        "stall_s": Table(
            "Asynchronous save: until the state may change", "seconds", [COPY], is_less_better=True
        ),
        "durable_s": Table("Asynchronous save: until durable", "seconds", is_less_better=True),
        "slowdown": Table(
            "Asynchronous save: a training step meanwhile", "times a quiet one", [DISK], is_less_better=True
        ),
        "jitter_ms": Table(
            "Asynchronous save: by how much the slowest step of a hundred is late",
            "milliseconds",
            [DISK],
            is_less_better=True,
        ),
        "extra_mib": Table(
            "Asynchronous save: memory", "MiB beyond the state, all processes", [COPY], is_less_better=True
        ),
    }
    for _ in range(rounds):
        for shape in shapes:
            for system, needs in SYSTEMS.items():
                try:
                    figures = run_cell(CELL, needs, system, shape, str(folder / f"async-{system}"))
                except RuntimeError as error:
                    # Shared memory needs an open file for each tensor; 20,000 exceed some systems' limit.
                    if system == "hocket":
                        raise
                    print(f"{system}, {shape}: {str(error).splitlines()[-1]}", file=sys.stderr)
                    continue
                for name, table in tables.items():
                    if name in figures:
                        table.add(system, shape, figures[name])
    return list(tables.values())
