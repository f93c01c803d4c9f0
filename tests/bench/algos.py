"""The cost of each training method in a step, in Hocket and in Composer.

Both trainers train the same models on the same data on one CPU core; the processor time in the methods'
`match` and `apply` is added up by step. For methods that replace modules or the step, the table has the time
of a whole step instead, and that of a plain one. Rounds of both systems alternate. Run it with
`uv run python tests/bench/algos.py`; `--no-peer` leaves Composer out, `--parts events` the whole steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from harness import run_cell

CELL = Path(__file__).with_name("cells") / "algos.py"
PEERS: dict[str, list[str] | None] = {"hocket": None, "composer": ["mosaicml==0.32.1", "transformers<5"]}


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["events", "steps"], choices=["events", "steps"])
    options = parser.parse_args()
    systems = ["hocket"] if options.no_peer else ["hocket", "composer"]
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.rounds):
        for system in systems:
            for row, figure in run_cell(CELL, PEERS[system], system, *options.parts).items():
                measured[row][system].append(figure)
    print("| method, setting | " + " | ".join(f"{system}, µs" for system in systems) + " | ratio |")
    print("|---|" + "---|" * (len(systems) + 1))
    for row, figures in measured.items():
        cells = [_cell(figures[system]) for system in systems]
        ratio = "–"
        if figures["hocket"] and figures["composer"] and statistics.median(figures["composer"]):
            ratio = f"{statistics.median(figures['hocket']) / statistics.median(figures['composer']):.2f}"
        print(f"| {row} | " + " | ".join(cells) + f" | {ratio} |")


def _cell(figures: list[float]) -> str:
    if not figures:
        return "–"
    return f"{statistics.median(figures):.0f} ({min(figures):.0f}–{max(figures):.0f})"


if __name__ == "__main__":
    main()
