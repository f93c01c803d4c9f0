"""`convert`, Ray Data and Spark write the same rows of Parquet to a data set, on the same two cores.

Each in a fresh process of this environment, which needs `ray` (`uv sync --group ray`) and Java; every round
has all of them, with inferred encodings and with given ones. Run it with `uv run python
tests/bench/stream_engines.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import stream_parquet
from harness import Table, run_cell

CELL = Path(__file__).parent / "cells" / "engines.py"
ENGINES = ["convert", "ray", "spark"]
COLUMNS = {"id": "int64", "tokens": "ndarray:int32", "text": "str", "score": "float64"}


def write(folder: Path, rounds: int, engines: list[str]) -> list[Table]:
    """Measure writing without the start of the engine, and that start."""
    source = folder / "parquet"
    if not source.exists():
        stream_parquet.cell("write", str(source))
    rate = Table("From Parquet to MDS on two cores", "rows/s without the engine's start", ["convert"])
    start = Table(
        "From Parquet to MDS on two cores", "seconds until the engine runs a task", is_less_better=True
    )
    for _ in range(rounds):
        for column, extra in {
            "encodings inferred": [],
            "encodings given": ["--columns", json.dumps(COLUMNS)],
        }.items():
            for engine in engines:
                out = folder / "engine-out"
                shutil.rmtree(out, ignore_errors=True)
                env = {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}
                figures = run_cell(CELL, None, engine, str(source), str(out), *extra, env=env)
                rate.add(engine, column, figures["rows_s"])
                start.add(engine, "start", figures["start_s"])
    return [rate, start]


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-stream"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for table in write(options.out, options.rounds, options.engines):
        table.show()


if __name__ == "__main__":
    main()
