"""The cost of a trainer's step beyond the user's own work: Hocket and its peers compared with a bare loop.

Every cell is a process of its own that trains the same small model on the CPU over the same batches in a
list. The cells alternate, round after round, so that a change of the machine's speed affects all of them. The
figure is processor time a step, from the first batch to the last, and its excess over the bare loop of the
same round. The cell `duties` is a loop written by hand with the duties that no step of Hocket's can leave
out. Further cells are two processes each, over gloo: torch's `DistributedDataParallel` in a loop; the same
with an additional sum of eight numbers a step, which the loop awaits at once (`ddp-waited`) or a step later
(`ddp-agreed`), on the gradients' group (`ddp-shared`), or as a gather (`ddp-gathered`); and Hocket.
Their figure is wall-clock time a step.

    uv run python tests/bench/trainer.py
    uv run python tests/bench/trainer.py --profile
    uv run python tests/bench/trainer.py --parts
    uv run python tests/bench/trainer.py --steps --cells bare,duties,hocket,hocket-in-use,fabric

A peer that is not installed is left out and named; `uv pip install lightning accelerate` adds three.
Composer 0.32 needs an older torch, so `uv` makes an environment of its own for it, and its excess is measured
against a bare loop in that environment. `--profile` measures the time of each duty of Hocket's step instead,
`--parts` the time of each part in use on all threads; `--steps` prints quantiles of single steps, which are
steady on a busy machine, too; and `--counts` counts calls, context switches and bytecodes, which are steady
on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import torch
from cells import trainer_counts, trainer_parts, trainer_profile, trainer_steps
from cells.trainer import CELLS, STEPS

CELLS_FILE = Path(__file__).parent / "cells" / "trainer.py"
COMPOSER = "mosaicml==0.32.1"
TIMEOUT_S = 180.0
"""Time limit for the start of a cell, and for a round; a cell that takes longer is ended and named."""
START_TIMEOUT_S = 900.0
"""Time limit for the start of Composer's cells, whose environment may have to be made first."""

BASES = {"composer": "composer-bare", "composer-bare": "composer-bare"}
"""The cell whose time is subtracted from a cell's; `bare` for cells not listed."""
RANKS = ("ddp", "ddp-waited", "ddp-agreed", "ddp-shared", "ddp-gathered", "hocket-ranks")
"""The cells of two ranks; the first is the base."""


class Cell:
    """The processes of a cell, one for each rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable]
        if name in BASES:
            # Variables of this script's environment must not reach the peer's environment.
            for variable in ("UV_NO_SYNC", "VIRTUAL_ENV", "PYTHONPATH"):
                environment.pop(variable, None)
            python = ".".join(map(str, sys.version_info[:2]))
            uv = ["uv", "run", "--isolated", "--no-project", "--python", python]
            command = [*uv, "--with", COMPOSER, "python"]
        ranks = _rank_variables(2) if name in RANKS else [{}]
        self.processes = [
            subprocess.Popen(
                [*command, str(CELLS_FILE), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**environment, **variables},
            )
            for variables in ranks
        ]

    def start(self) -> str | None:
        """Wait until the cell is ready; otherwise return the name of the missing package."""
        timeout_s = START_TIMEOUT_S if self.name in BASES else TIMEOUT_S
        answers = self._read_all(timeout_s)
        if answers is None:
            return "a process ended, or did not answer"
        return next((answer["missing"] for answer in answers if "missing" in answer), None)

    def measure(self) -> tuple[float, float] | None:
        """Run a round; return processor and wall-clock µs a step, averaged over the ranks."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("run\n")
            process.stdin.flush()
        answers = self._read_all(TIMEOUT_S)
        if answers is None:
            return None
        return tuple(statistics.mean(one[name] for one in answers) * 1e6 for name in ("seconds", "wall_s"))

    def _read_all(self, timeout_s: float) -> list[dict[str, float]] | None:
        lines = [_read(process, timeout_s) for process in self.processes]
        return [json.loads(line) for line in lines] if all(lines) else None

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _rank_variables(num_ranks: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"LOCAL_WORLD_SIZE": str(num_ranks), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _read(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Return a cell's next line, or nothing if it ends; end it after `timeout_s`."""
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def start_cells(names: list[str]) -> dict[str, Cell]:
    """Start the cells that can run, and print the names of the others."""
    cells = {}
    for name in names:
        if name in BASES and shutil.which("uv") is None:
            print(f"{name}: not measured (`uv` was not found: it makes Composer's environment)")
            continue
        cell = Cell(name)
        if (missing := cell.start()) is None:
            cells[name] = cell
        else:
            print(f"{name}: not measured ({missing})")
            cell.close()
    return cells


def measure(cells: dict[str, Cell], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Run the cells alternately; return processor and wall-clock µs a step of each round but the first."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in cells}
    for number in range(rounds + 1):
        for name, cell in list(cells.items()):
            if (measured := cell.measure()) is None:
                print(f"{name}: left out from round {number} on (it ended, or did not answer)")
                cells.pop(name).close()
                figures.pop(name)
            elif number:  # the first round warms up
                figures[name].append(measured)
    for cell in cells.values():
        cell.close()
    return figures


def print_tables(figures: dict[str, list[tuple[float, float]]]) -> None:
    """Print the costs of one process, and the times of two ranks.

    The last two columns compare the fastest tenth of each cell's own rounds. Other work on the machine or its
    host only adds to a round, so these columns are steady where the medians are not.
    """
    print(
        "| cell | µs of processor a step, median | over bare, median | quartiles | of Fabric's "
        "| in the quickest tenth | over bare | of Fabric's |"
    )
    print("|---|---|---|---|---|---|---|---|")
    over = {
        name: [value[0] - alone[0] for value, alone in zip(values, figures[base], strict=True)]
        for name, values in figures.items()
        if name not in RANKS and (base := BASES.get(name, "bare")) in figures
    }
    quick = {name: _first_decile([value[0] for value in values]) for name, values in figures.items()}
    quick_over = {name: quick[name] - quick[BASES.get(name, "bare")] for name in over}
    medians = {name: statistics.median(excess) for name, excess in over.items()}
    for name, excess in over.items():
        low, _, high = statistics.quantiles(excess)
        alone = statistics.median(value[0] for value in figures[name])
        print(
            f"| {name} | {alone:.1f} | {medians[name]:.1f} | {low:.1f} – {high:.1f} | "
            f"{_share(name, medians)} | {quick[name]:.1f} | {quick_over[name]:.1f} | "
            f"{_share(name, quick_over)} |"
        )
    ranks = [name for name in RANKS if name in figures]
    if len(ranks) < 2 or ranks[0] != RANKS[0]:
        return
    print("\n| two ranks over gloo | wall-clock µs a step, median | of torch's DDP, median | quartiles |")
    print("|---|---|---|---|")
    for name in ranks:
        ratios = [value[1] / base[1] for value, base in zip(figures[name], figures[RANKS[0]], strict=True)]
        low, _, high = statistics.quantiles(ratios)
        wall = statistics.median(value[1] for value in figures[name])
        print(f"| {name} | {wall:.1f} | {statistics.median(ratios):.3f} | {low:.3f} – {high:.3f} |")


def _first_decile(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def _share(name: str, over: dict[str, float]) -> str:
    """Return an excess as a share of Fabric's, or nothing without Fabric and for the bare loops."""
    if "fabric" not in over or name in ("bare", "composer-bare"):
        return ""
    return f"{over[name] / over['fabric']:.2f}"


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {list(CELLS)}")
    parser.add_argument("--profile", action="store_true", help="measure the duties of Hocket's step instead")
    parser.add_argument("--parts", action="store_true", help="measure the parts of a step in use instead")
    parser.add_argument("--steps", action="store_true", help="quantiles of single steps, in one process")
    parser.add_argument("--counts", action="store_true", help="calls, switches and bytecodes, in one process")
    parser.add_argument("--small", action="store_true", help="with --steps, a model of one layer")
    options = parser.parse_args()
    if options.profile:
        trainer_profile.main(options.rounds)
        return
    if options.parts:
        trainer_parts.main(options.rounds)
        return
    if options.counts:
        trainer_counts.main(options.cells.split(","))
        return
    if options.steps:
        trainer_steps.main(options.cells.split(","), options.rounds, is_small=options.small)
        return
    figures = measure(start_cells(options.cells.split(",")), options.rounds)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"torch {torch.__version__}, {options.rounds} rounds of {STEPS} steps; load {load}\n")
    print_tables(figures)


if __name__ == "__main__":
    main()
