"""Shared code of the benchmarks: cells in environments of their own, tables of medians, and charts.

A cell is one measurement of one system in a fresh process, which prints one JSON object. Every round measures
all systems, so that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt

TIMEOUT_S = 900


@dataclass
class Table:
    """Repeated figures by system and column; `limits` are systems that are limits and not peers."""

    title: str
    unit: str
    limits: Sequence[str] = ()
    is_less_better: bool = False
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, system: str, column: str, figure: float) -> None:
        """Add one figure."""
        self.figures.setdefault(system, {}).setdefault(column, []).append(figure)

    def show(self) -> None:
        """Print medians, spread, and each column's ratios of Hocket to the fastest peer and to the limit."""
        columns = list(dict.fromkeys(column for row in self.figures.values() for column in row))
        print(f"\n{self.title}, {self.unit}: median [least..most]")
        for column in columns:
            print(f"  {column}")
            for system, row in self.figures.items():
                if values := row.get(column):
                    middle = statistics.median(values)
                    spread = f"[{min(values):,.4g}..{max(values):,.4g}]"
                    print(f"    {system:20}{middle:14,.4g} {spread}", flush=True)
            self._show_ratios(column)

    def _show_ratios(self, column: str) -> None:
        medians = {
            system: statistics.median(row[column]) for system, row in self.figures.items() if column in row
        }
        hocket_median = medians.pop("hocket", None)
        limits = {name: medians.pop(name) for name in self.limits if name in medians}
        if hocket_median is None:
            return
        if medians:
            best = (min if self.is_less_better else max)(medians, key=lambda system: medians[system])
            print(f"    {'hocket ÷ ' + best:34}{hocket_median / medians[best]:7.2f}")
        for name, limit in limits.items():
            print(f"    {'hocket ÷ ' + name:34}{hocket_median / limit:7.2f}")


def run_cell(
    script: Path, needs: Sequence[str] | None, *arguments: str, env: dict[str, str] | None = None
) -> dict[str, float]:
    """Run one cell and return the object that it printed.

    Args:
        script: The cell's program.
        needs: Packages of its environment, which uv makes at the first use; None for this environment.
        arguments: Arguments of the program.
        env: Variables added to the environment.

    Raises:
        RuntimeError: The cell failed; the message has the end of its standard error.
    """
    command = [sys.executable]
    if needs is not None:
        command = ["uv", "run", "--quiet", "--no-project", "--python", "3.11"]
        for need in ["numpy<2.2", *needs]:
            command += ["--with", need]
        command.append("python")
    os.sync()  # flush what an earlier cell wrote, so that this one does not wait for it
    completed = subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        check=False,
    )
    if completed.returncode:
        raise RuntimeError(f"{script.name} {' '.join(arguments)} failed:\n{completed.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    print(script.stem, *arguments, figures, file=sys.stderr, flush=True)
    return figures


def measure_parts(
    parts: Mapping[str, Callable[[], list[Table]]], chosen: Sequence[str], picture: Path
) -> None:
    """Measure the chosen parts, print the tables of each when it is done, and draw charts of all."""
    tables: list[Table] = []
    for part in chosen:
        part_tables = parts[part]()
        for table in part_tables:
            table.show()
        tables += part_tables
    draw(tables, picture)
    print(f"\npicture: {picture}")


def draw(tables: list[Table], path: Path) -> None:
    """Draw each table's medians as bars."""
    figure, axes = plt.subplots(len(tables), 1, figsize=(9, 3.2 * len(tables)), squeeze=False)
    for axis, table in zip(axes[:, 0], tables, strict=True):
        columns = list(dict.fromkeys(column for row in table.figures.values() for column in row))
        width = 0.8 / len(table.figures)
        for number, (system, row) in enumerate(table.figures.items()):
            places = [i + number * width for i, column in enumerate(columns) if column in row]
            axis.bar(places, [statistics.median(row[c]) for c in columns if c in row], width, label=system)
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(columns))], columns)
        axis.set_title(f"{table.title}: {table.unit}", fontsize=10)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
