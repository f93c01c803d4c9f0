"""Lance data sets read in a shuffled order through pylance, beside the same rows of Parquet read in place.

`scan` reads in storage order and is the limit. `take` reads the rows of each batch by number; `blocks` reads
whole fragments and permutes their rows in memory. Both give the same order, which is compared from the middle
of an epoch on. Run it with `uv run python tests/bench/stream_lance.py`.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import stream_parquet
from harness import Table, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "lance_rows.py"
NEEDS = ["pylance==14.0.2", "pyarrow==26.0.1"]
MODES = ["scan", "take", "blocks"]
MIDDLE = 780  # of 1,563 batches


def cell(*arguments: str, env: dict[str, str] | None = None) -> dict[str, float]:
    """Run one cell of `cells/lance_rows.py`."""
    return run_cell(CELL, NEEDS, *arguments, env=env)


def read_lance(folder: Path, rounds: int, *, latency_ms: int, bandwidth: int, profile: str) -> list[Table]:
    """Measure one rank, two ranks at once, and the first batch from the middle; local and from a store."""
    source = folder / "parquet"
    if not source.exists():
        stream_parquet.cell("write", str(source))
    link = f"from S3, {latency_ms} ms"
    rate = Table("Lance in a shuffled order", "rows/s of one rank", ["scan"])
    both = Table("Lance in a shuffled order", "rows/s of two ranks together", ["scan"])
    first = Table(
        "Lance in a shuffled order", "seconds to the first batch, from the middle", is_less_better=True
    )
    with Server(latency_ms=latency_ms, bandwidth=bandwidth, profile=profile) as server:
        env = stream_parquet.env_of(server)
        stream_parquet.upload(source, server, "parquet")
        places = [(str(folder / "rows.lance"), "local"), (f"{server.uri('rows')}.lance", link)]
        for place, _ in places:
            if "://" in place or not Path(place).exists():
                cell("write", place, "--source", str(source), env=env)
        for _ in range(rounds):
            for place, column in places:
                orders = set()
                for mode in MODES:
                    figures = cell(mode, place, env=env)
                    rate.add(mode, column, figures["rows_s"])
                    ranks = [[mode, place, "--rank", str(rank), "--world-size", "2"] for rank in range(2)]
                    with ThreadPoolExecutor(2) as pool:
                        parts = list(pool.map(lambda arguments: cell(*arguments, env=env), ranks))
                    both.add(mode, column, sum(part["rows_s"] for part in parts))
                    if mode == "scan":
                        continue
                    later = cell(mode, place, "--first", str(MIDDLE), "--seconds", "0", env=env)
                    first.add(mode, column, later["first_batch_s"])
                    orders.add(later["order"])
                if len(orders) > 1:
                    raise RuntimeError(f"the first batch from the middle has several orders: {orders}")
                where = str(source) if column == "local" else server.uri("parquet")
                cache = str(folder / "lance-cache" / str(len(rate.figures.get("hocket", {}).get(column, []))))
                figures = stream_parquet.cell("hocket", where, "--cache", cache, env=env)
                rate.add("hocket", column, figures["rows_s"])
    return [rate, both, first]


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-stream"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=int, default=20)
    parser.add_argument("--bandwidth", type=int, default=100_000_000)
    parser.add_argument("--profile", default="release", help="cargo profile of the S3 server")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tables = read_lance(
        options.out,
        options.rounds,
        latency_ms=options.latency_ms,
        bandwidth=options.bandwidth,
        profile=options.profile,
    )
    for table in tables:
        table.show()


if __name__ == "__main__":
    main()
