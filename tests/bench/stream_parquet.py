"""Parquet in place beside LitData, `datasets` and pyarrow in one run: local, from S3, and the first batch.

Each system runs in an environment of its own, each cell in a fresh process, and every round measures all
systems. pyarrow reads the same columns in the order of the files, and is a limit. Run it with `uv run python
tests/bench/stream.py --parts parquet`, or alone with `uv run python tests/bench/stream_parquet.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import Table, measure_parts, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "parquet.py"
_ARROW = ["pyarrow==26.0.1"]
#: The packages of each system's environment besides NumPy; None is this one.
SYSTEMS: dict[str, list[str] | None] = {
    "hocket": None,
    "hocket_cached": None,
    "litdata": ["litdata==0.2.76", "polars==2.1.0", "s3fs==2026.9.0", *_ARROW],
    "datasets": ["datasets==5.2.0", "s3fs==2026.9.0", *_ARROW],
    "pyarrow": _ARROW,
}
LIMIT = "pyarrow"
MANY_FILES = (10_000, 64, 64)


def cell(system: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, float]:
    """Run one cell of `cells/parquet.py`."""
    needs = SYSTEMS["pyarrow"] if system == "write" else SYSTEMS[system]
    return run_cell(CELL, needs, system, *arguments, env=env)


def read_parquet(
    folder: Path, rounds: int, *, latency_ms: int, bandwidth: int, profile: str = "release"
) -> list[Table]:
    """Measure epochs of local files and of files in a store."""
    source = folder / "parquet"
    if not source.exists():
        cell("write", str(source))
    link = f"from S3, {latency_ms} ms and {bandwidth / 1e6:.0f} MB/s a connection"
    rate = Table("Parquet in place", "rows/s after the first batch", [LIMIT])
    epoch = Table("Parquet in place", "rows/s of an epoch with its start", [LIMIT])
    first = Table("Parquet in place", "seconds to the first batch", [LIMIT], is_less_better=True)
    cost = Table("Parquet in place", "µs of processor time a row", [LIMIT], is_less_better=True)
    with Server(latency_ms=latency_ms, bandwidth=bandwidth, profile=profile) as server:
        env = env_of(server)
        upload(source, server, "parquet")
        for _ in range(rounds):
            for place, column in ((str(source), "local"), (server.uri("parquet"), link)):
                shutil.rmtree(folder / "cache", ignore_errors=True)
                cache = folder / "cache" / "hocket"
                if "://" not in place:  # a local folder is read in place, so its cache has to be filled first
                    cell("hocket_cached", place, "--cache", str(cache), env=env)
                for system in SYSTEMS:
                    if system == "litdata" and "://" in place:
                        continue  # it looks for an index beside the files, which has to be written first
                    cache = folder / "cache" / system.partition("_")[0]
                    figures = cell(system, place, "--cache", str(cache), env=env)
                    rate.add(system, column, figures["rows_s"])
                    epoch.add(system, column, figures["epoch_rows_s"])
                    first.add(system, column, figures["first_batch_s"])
                    cost.add(system, column, figures["cpu_us_row"])
    return [rate, epoch, first, cost]


def read_many(
    folder: Path, rounds: int, *, latency_ms: int, bandwidth: int, profile: str = "release"
) -> list[Table]:
    """Measure the seconds to the first batch of 10,000 files in a store, without and with cached footers."""
    source, (files, *_) = folder / "many", MANY_FILES
    if not source.exists():
        cell("write", str(source), "--shape", *map(str, MANY_FILES))
    title = f"{files:,} Parquet files in S3, {latency_ms} ms"
    first = Table(title, "seconds to the first batch", is_less_better=True)
    with Server(latency_ms=latency_ms, bandwidth=bandwidth, profile=profile) as server:
        upload(source, server, "many")
        for _ in range(rounds):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            for column in ("cold", "cached footers"):
                cache = folder / "cache"
                figures = cell(
                    "hocket", server.uri("many"), "--cache", str(cache), "--first", env=env_of(server)
                )
                first.add("hocket", column, figures["first_batch_s"])
    return [first]


def env_of(server: Server) -> dict[str, str]:
    return {**server.env, "S3_ENDPOINT_URL": server.endpoint, "AWS_ENDPOINT_URL": server.endpoint}


def upload(source: Path, server: Server, prefix: str) -> None:
    """Put a folder's files into the server's bucket, many at once."""
    from hocket.native import Store

    os.environ.update(server.env)
    store = Store(server.uri())
    with ThreadPoolExecutor(64) as pool:
        for future in [
            pool.submit(store.put, f"{prefix}/{path.name}", path.read_bytes())
            for path in sorted(source.glob("*.parquet"))
        ]:
            future.result(timeout=120)


def main() -> None:
    """Measure, print tables, draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-stream"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=int, default=20)
    parser.add_argument("--bandwidth", type=int, default=100_000_000)
    parser.add_argument("--parts", nargs="+", default=["epochs", "many"], choices=["epochs", "many"])
    parser.add_argument("--profile", default="release", help="cargo profile of the S3 server")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    link = {"latency_ms": options.latency_ms, "bandwidth": options.bandwidth, "profile": options.profile}
    measures = {
        "epochs": lambda: read_parquet(options.out, options.rounds, **link),
        "many": lambda: read_many(options.out, options.rounds, **link),
    }
    measure_parts(measures, options.parts, options.out / "parquet.png")


if __name__ == "__main__":
    main()
