"""The part `ranks` of `tests/bench/ckpt.py`: two ranks save and load together, on a disk and an S3 server."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import Table, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "ranks.py"
SYSTEMS = ["hocket", "dcp", "dcp_hf"]
#: The packages of each system's environment; None is this one.
S3_SYSTEMS: dict[str, list[str] | None] = {
    "hocket": None,
    "s3torchconnector": ["s3torchconnector[dcp]==1.5.0", "torch", "setuptools"],
}


def measure(folder: Path, shapes: list[str], rounds: int) -> list[Table]:
    """Measure all cells, round by round; each figure is that of the slower rank."""
    save, load = Table("Save until durable, 2 ranks", "GB/s"), Table("Load, warm, 2 ranks", "GB/s")
    save_s3, load_s3 = Table("Save to S3, 2 ranks", "GB/s"), Table("Load from S3, 2 ranks", "GB/s")
    extra = Table("Save to S3, 2 ranks", "MiB beyond the tensors, of a rank", is_less_better=True)
    for number in range(rounds):
        for shape in shapes:
            for system in SYSTEMS:
                place = str(folder / f"ranks-{shape}-{system}")
                save.add(system, shape, run_cell(CELL, None, "save", system, shape, place)["gb_s"])
            for system in SYSTEMS:
                place = str(folder / f"ranks-{shape}-{system}")
                load.add(system, shape, run_cell(CELL, None, "load", system, shape, place)["gb_s"])
            with Server() as server:
                for system, needs in S3_SYSTEMS.items():
                    cell = [system, shape, str(folder), "--uri", server.uri(f"{system}-{number}")]
                    figures = run_cell(CELL, needs, "save", *cell, env=server.env)
                    save_s3.add(system, shape, figures["gb_s"])
                    extra.add(system, shape, figures["extra_mib"])
                    load_s3.add(system, shape, run_cell(CELL, needs, "load", *cell, env=server.env)["gb_s"])
    return [save, load, save_s3, load_s3, extra]
