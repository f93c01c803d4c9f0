"""Streaming against its peers: writing, warm reading in one process and in workers, cold reading, in one run.

Each system runs in an environment of its own (which uv makes at the first use), each cell in a fresh process.
Every round measures all systems, so that a change of the machine's speed affects all. Prints tables of
medians with spread and the ratio to the fastest peer, and draws them.

Run it with `uv run python tests/bench/stream.py --out out/bench-stream`; `--help` lists the options.
The cold part runs on `tools/s3d` with a latency and a bandwidth for every connection.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import stream_parquet
from harness import Table, measure_parts, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "samples.py"
SAMPLES = {"tokens": 250_000, "blobs": 16_000}
#: The packages of each system's environment besides NumPy; None is this one.
SYSTEMS: dict[str, list[str] | None] = {
    "hocket": None,
    "mosaicml_streaming": ["mosaicml-streaming==0.13.0"],
    "litdata": ["litdata==0.2.76"],
    "webdataset": ["webdataset==1.0.2", "torch"],
    "hocket_unkept": None,
    "memmap": [],
    "zstd": [],
    "obstore": ["obstore==0.12.1"],
    "obstore_kept": ["obstore==0.12.1"],
}
#: Limits, which are no peers: the same batches from one memory map; the command `zstd` on all cores; plain
#: requests of all bytes, into memory and into files.
LIMIT, ZIP_LIMIT, COLD_LIMITS = "memmap", "zstd", ["obstore", "obstore_kept"]
PEERS = [system for system in SYSTEMS if system not in [ZIP_LIMIT, "hocket_unkept", *COLD_LIMITS]]


def cell(system: str, phase: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, float]:
    """Run one cell of `cells/samples.py`."""
    return run_cell(CELL, SYSTEMS[system], phase, system, *arguments, env=env)


def write(folder: Path, workloads: list[str], systems: list[str], rounds: int) -> list[Table]:
    """Measure writing; the files of the last round remain for reading."""
    returned = Table("Writing, until the writer has finished", "MB/s of samples", [LIMIT, ZIP_LIMIT])
    durable = Table("Writing, until all is on the disk", "MB/s of samples", [LIMIT, ZIP_LIMIT])
    for _ in range(rounds):
        for workload in workloads:
            for system in [*systems, ZIP_LIMIT]:
                for compression in [None, "zstd:3"] if workload == "tokens" else [None]:
                    if system not in (
                        {"hocket", "mosaicml_streaming", ZIP_LIMIT} if compression else systems
                    ):
                        continue
                    place = folder / f"{workload}-{system}{'-zstd' if compression else ''}"
                    shutil.rmtree(place, ignore_errors=True)
                    extra = ["--compression", compression] if compression else []
                    figures = cell(
                        system, "write", workload, str(place), "--samples", str(SAMPLES[workload]), *extra
                    )
                    column = f"{workload}, {compression or 'raw'}"
                    returned.add(system, column, figures["mb_s"])
                    durable.add(system, column, figures["durable_mb_s"])
    return [returned, durable]


def read_warm(folder: Path, workloads: list[str], systems: list[str], rounds: int) -> list[Table]:
    """Measure shuffled reading of files that are in the page cache."""
    rate = Table("Warm reading", "samples/s after the first batch", [LIMIT])
    memory = Table(
        "Warm reading", "peak MiB of the process, mapped files included", [LIMIT], is_less_better=True
    )
    batches = {"tokens": [64, 1024], "blobs": [32]}
    for number in range(rounds + 1):
        for workload in workloads:
            for system in systems:
                for batch in batches[workload]:
                    place = folder / f"{workload}-{system}"
                    figures = cell(system, "read", workload, str(place), "--batch", str(batch))
                    if figures["samples"] < 0.95 * SAMPLES[workload]:
                        raise RuntimeError(
                            f"{system} read {figures['samples']} samples of {SAMPLES[workload]}"
                        )
                    if number:  # the first round fills the page cache
                        column = f"{workload}, batches of {batch}"
                        rate.add(system, column, figures["samples_s"])
                        memory.add(system, column, figures["peak_rss_mib"])
    return [rate, memory]


def read_in_workers(folder: Path, workloads: list[str], systems: list[str], rounds: int) -> list[Table]:
    """Measure warm reading with two worker processes."""
    rate = Table("Warm reading in two workers", "samples/s after the first batch")
    cost = Table(
        "Warm reading in two workers", "µs of processor time a sample, all processes", is_less_better=True
    )
    for number in range(rounds + 1):
        for workload in workloads:
            for system in systems:
                if system == LIMIT:
                    continue
                place, batch = folder / f"{workload}-{system}", {"tokens": "64", "blobs": "32"}[workload]
                figures = cell(system, "read", workload, str(place), "--batch", batch, "--workers", "2")
                if number:  # the first round fills the page cache
                    rate.add(system, f"{workload}, batches of {batch}", figures["samples_s"])
                    cost.add(system, f"{workload}, batches of {batch}", figures["cpu_us_sample"])
    return [rate, cost]


def read_cold(
    folder: Path, systems: list[str], rounds: int, *, latency_ms: int, bandwidth: int
) -> list[Table]:
    """Measure an epoch from a store into an empty cache: Hocket and mosaicml-streaming, raw shards."""
    readers = ["hocket", "hocket_unkept", "mosaicml_streaming"]
    systems = [name for name in readers if name.partition("_unkept")[0] in systems] + COLD_LIMITS
    title = f"Cold from S3, {latency_ms} ms and {bandwidth / 1e6:.0f} MB/s a connection"
    epoch = Table(title, "MB/s of an epoch", COLD_LIMITS)
    first = Table(title, "seconds to the first batch", COLD_LIMITS, is_less_better=True)
    size = {"tokens": 4096, "blobs": 1 << 16}
    with Server(latency_ms=latency_ms, bandwidth=bandwidth, profile="release") as server:
        env = {**server.env, "S3_ENDPOINT_URL": server.endpoint}
        for workload in size:
            upload(folder / f"{workload}-hocket", server, workload)
        for _ in range(rounds):
            for workload in size:
                for system in systems:
                    cache = folder / "cache"
                    shutil.rmtree(cache, ignore_errors=True)
                    figures = cell(
                        system, "read", workload, str(cache), "--remote", server.uri(workload), env=env
                    )
                    seconds = figures["epoch_s"]
                    epoch.add(system, workload, figures["samples"] * size[workload] / seconds / 1e6)
                    first.add(system, workload, figures["first_batch_s"])
    return [epoch, first]


def upload(source: Path, server: Server, prefix: str) -> None:
    """Put a data set's files into the server's bucket."""
    from hocket.native import Store

    os.environ.update(server.env)
    store = Store(server.uri())
    for path in sorted(source.iterdir()):
        store.put(f"{prefix}/{path.name}", path.read_bytes())


def _missing(options: argparse.Namespace) -> list[str]:
    """Return the data sets that the parts read and that no earlier run has written."""
    names = [f"{workload}-{system}" for workload in options.workloads for system in options.systems]
    if options.parts == ["parquet"]:
        names = []
    elif options.parts == ["cold"]:
        names = [f"{workload}-hocket" for workload in SAMPLES]
    return [name for name in names if not (options.out / name).exists()]


def main() -> None:
    """Measure, print tables, draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-stream"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", default=list(SAMPLES), choices=list(SAMPLES))
    parser.add_argument("--systems", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--latency-ms", type=int, default=20)
    parser.add_argument("--bandwidth", type=int, default=100_000_000)
    parts = ["write", "warm", "workers", "cold", "parquet"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if "write" not in options.parts and (missing := _missing(options)):
        parser.error(f"there is no {', no '.join(missing)} in {options.out}: add `write` to `--parts`")
    measured = options.out, options.workloads, options.systems, options.rounds
    link = {"latency_ms": options.latency_ms, "bandwidth": options.bandwidth}
    measures: dict[str, Callable[[], list[Table]]] = {
        "write": lambda: write(*measured),
        "warm": lambda: read_warm(*measured),
        "workers": lambda: read_in_workers(*measured),
        "cold": lambda: read_cold(options.out, options.systems, options.rounds, **link),
        "parquet": lambda: (
            stream_parquet.read_parquet(options.out, options.rounds, **link)
            + stream_parquet.read_many(options.out, options.rounds, **link)
        ),
    }
    measure_parts(measures, options.parts, options.out / "stream.png")


if __name__ == "__main__":
    main()
