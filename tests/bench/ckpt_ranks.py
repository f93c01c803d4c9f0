"""The part `ranks` of `tests/bench/ckpt.py`: two ranks save and load together, on a disk and an S3 server.

Run as a program it simulates thousands of ranks that save a model of 70B parameters with AdamW's moments:
what rank 0 does between the last report and the commit, what each rank does to open the checkpoint, and the
plan of a `reshard` of 300 small tensors to as many ranks. Each phase is a process of its own, whose memory is
the peak beyond the imports and the reports: `python tests/bench/ckpt_ranks.py --ranks 1024 4096`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from harness import Table, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "ranks.py"
SYSTEMS = ["hocket", "dcp", "dcp_hf"]
MANY_RANKS = CELL.with_name("many_ranks.py")
#: The figures of simulated ranks: phase, key and what it is.
FIGURES = [
    ("report", "report_ms", "each rank: pack its report, ms"),
    ("report", "reports_mb", "all reports, MB"),
    ("commit", "commit_s", "rank 0: reports to manifest, s"),
    ("commit", "commit_cpu_s", "the same, s of processor"),
    ("commit", "commit_lock_ms", "with the interpreter's lock, ms of processor"),
    ("commit", "commit_first_ms", "with the lock at the first save of a layout only, ms"),
    ("commit", "commit_mib", "rank 0's memory, MiB"),
    ("commit", "manifest_mb", "the manifest, MB"),
    ("open", "open_s", "each rank: open, s"),
    ("open", "open_cpu_s", "the same, s of processor"),
    ("open", "open_mib", "its memory, MiB"),
    ("reshard", "reshard_s", "reshard: plan, s"),
    ("reshard", "reshard_us_per_chunk", "the same, µs of processor a chunk"),
    ("reshard", "reshard_mib", "its memory, MiB"),
]
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


def simulate(counts: list[int]) -> None:
    """Print the figures of a save and a load by as many ranks, without the ranks."""
    figures: dict[int, dict[str, float]] = {}
    for count in counts:
        figures[count] = {}
        with tempfile.TemporaryDirectory() as folder:
            for phase in dict.fromkeys(phase for phase, *_ in FIGURES):
                figures[count] |= run_cell(MANY_RANKS, None, phase, str(count), folder)
    print(f"{'ranks':54}" + "".join(f"{count:>10,}" for count in counts))
    for _, key, title in FIGURES:
        print(f"{title:54}" + "".join(f"{figures[count][key]:>10.4g}" for count in counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    simulate(parser.parse_args().ranks)
