"""The part `offline` of `tests/bench/ckpt.py`: checkpoints of two ranks rewritten, merged and verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness import Table, run_cell

CELLS = Path(__file__).parent / "cells"
#: The system that saved the source of each kind of work; torch's own functions do the first two kinds.
WORKS = {"torch": "dcp", "safetensors": "dcp_hf", "reshard": "hocket", "merge": "hocket", "verify": "hocket"}
#: Kinds of work whose source is not in the page cache.
COLD = {"merge"}
PEERS = {"torch": "dcp", "safetensors": "dcp"}


def measure(
    folder: Path,
    shapes: list[str],
    systems: list[str],
    rounds: int,
    limit: Callable[[str], float | None],
) -> list[Table]:
    """Measure the cells of Hocket and of the peers among `systems`; a column is a kind of work on a state.

    `limit` gives the disk's rate for `read` or `write`. A merge reads three checkpoints from the disk, for
    each of whose bytes it writes a third of one; its rate is that of the bytes read.
    """
    rate = Table("Rewrite until durable, or verify", "GB/s", ["fio"])
    core = Table("Verify, warm", "GB/s a core")
    memory = Table("Rewrite or verify", "MiB beyond the imports", is_less_better=True)
    for shape in shapes:
        for system in sorted(set(WORKS.values())):
            place = str(folder / f"ranks-{shape}-{system}")
            run_cell(CELLS / "ranks.py", None, "save", system, shape, place)
    for _ in range(rounds):
        for shape in shapes:
            for work, writer in WORKS.items():
                column = f"{work}, {shape}"
                if work != "verify" and (most := limit("read" if work == "merge" else "write")) is not None:
                    rate.add("fio", column, most)
                for system in ["hocket", *(peer for peer in [PEERS.get(work)] if peer in systems)]:
                    source, target = folder / f"ranks-{shape}-{writer}", folder / "rewritten"
                    cold = ["--cold"] if work in COLD else []
                    figures = run_cell(
                        CELLS / "offline.py", None, work, system, str(source), str(target), *cold
                    )
                    rate.add(system, column, figures["gb_s"])
                    memory.add(system, column, figures["extra_mib"])
                    if work == "verify":
                        core.add(system, column, figures["gb_cpu_s"])
    return [rate, core, memory]
