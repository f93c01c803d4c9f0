"""Checkpoints against the peers in one run: durable saves, warm and cold loads, the same with S3, and more.

The parts: `disk` and `s3` with one process, `small` with 20,000 small tensors, `ranks` with two processes,
`async` during training, `offline` rewriting, merging and verifying checkpoints of two ranks, `compressed`
the sizes of compressed checkpoints and of published deltas, `weights` the rates of publishers and followers.
`disk` starts no cell after `--minutes`; in the first round each shape gets an equal part of this time.

Each system runs in an environment of its own (which uv makes at the first use), each cell in a fresh process.
Every round measures all systems, so that a change of the machine's speed affects all. Limits of the same run:
`fio`'s direct write and read (a Debian package), and a copy in memory.

Run it with `uv run python tests/bench/ckpt.py --out out/bench-ckpt`. Cold loads need root, to drop the page
cache. The folder should be on the disk to be measured, with some 5 GB free.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import ckpt_async
import ckpt_compressed
import ckpt_offline
import ckpt_ranks
import ckpt_small
import ckpt_weights
from harness import TIMEOUT_S, Table, measure_parts, run_cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.s3d import Server

CELL = Path(__file__).parent / "cells" / "checkpoint.py"
#: The packages of each system's environment; None is this one.
SYSTEMS: dict[str, list[str] | None] = {
    "hocket": None,
    "safetensors": None,
    "torch": None,
    "dcp": None,
    "dcp_hf": None,
    "torchsnapshot": ["torchsnapshot==0.1.0", "torch", "setuptools<80"],
    "torch_checkpointing": ["torch_checkpointing==0.1.1", "torch"],
    "runai": ["runai-model-streamer==0.17.0", "torch"],
}
#: Systems that only read, and the systems whose files they read.
READERS = {"runai": "safetensors"}
LIMITS = ["fio", "memcpy"]
PARTS = ["disk", "s3", "small", "ranks", "async", "offline", "compressed", "weights"]
#: The same for an S3 server; `obstore` puts and gets the bytes as plain objects, and is a limit.
S3_SYSTEMS: dict[str, list[str] | None] = {
    "hocket": None,
    "s3torchconnector": ["s3torchconnector[dcp]==1.5.0", "torch", "setuptools"],
    "runai": [
        "runai-model-streamer==0.17.0",
        "runai-model-streamer-s3==0.17.1",
        "boto3",
        "safetensors",
        "torch",
    ],
    "obstore": ["obstore==0.12.1", "torch"],
}


def cell(phase: str, system: str, shape: str, folder: Path, *arguments: str) -> dict[str, float]:
    """Run one cell of `cells/checkpoint.py`."""
    base = system.removesuffix("_unchecked")
    needs = None if system == "memcpy" else SYSTEMS[base]
    place = folder / f"{shape}-{READERS.get(base, base)}"
    return run_cell(CELL, needs, phase, system, shape, str(place), *arguments)


def fio(folder: Path, kind: str) -> float | None:
    """Return the GB/s of direct sequential `kind` (`write` or `read`) in 4 MiB blocks, if fio exists."""
    if shutil.which("fio") is None:
        return None
    command = ["fio", "--name=limit", f"--rw={kind}", "--bs=4M", "--size=512M", "--numjobs=2", "--direct=1"]
    command += ["--ioengine=psync", "--end_fsync=1", "--group_reporting", "--output-format=json"]
    completed = subprocess.run(
        [*command, f"--directory={folder}"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return float(json.loads(completed.stdout)["jobs"][0][kind]["bw_bytes"]) / 1e9


def measure(
    folder: Path, shapes: list[str], systems: list[str], rounds: int, *, minutes: float
) -> list[Table]:
    """Measure all cells, round by round, until the time is over."""
    save = Table("Save until durable", "GB/s", LIMITS)
    warm = Table("Load, files in the page cache, into tensors that stand ready", "GB/s", LIMITS)
    cold = Table("Load, page cache dropped", "GB/s", LIMITS)
    again = Table("Load a second time, after a load with the page cache dropped", "GB/s", LIMITS)
    memory = Table("Load, warm", "MiB beyond the tensors, mapped files included", LIMITS, is_less_better=True)
    start = time.monotonic()
    for number in range(rounds):
        for position, shape in enumerate(shapes, 1):
            part = position / len(shapes) if number == 0 else 1.0
            end = start + minutes * 60 * part
            if number and time.monotonic() > end:
                return [save, warm, cold, again, memory]
            if (rate := fio(folder, "write")) is not None:
                save.add("fio", shape, rate)
            if (rate := fio(folder, "read")) is not None:
                cold.add("fio", shape, rate)
            for system in _until(end, systems):
                if system not in READERS:
                    save.add(system, shape, cell("save", system, shape, folder)["gb_s"])
                for reader in [system, *(["hocket_unchecked"] if system == "hocket" else [])]:
                    figures = cell("load", reader, shape, folder)
                    warm.add(reader, shape, figures["gb_s"])
                    memory.add(reader, shape, figures["extra_mib"])
                figures = cell("load", system, shape, folder, "--cold")
                cold.add(system, shape, figures["gb_s"])
                again.add(system, shape, figures["again_gb_s"])
            rate = cell("load", "memcpy", shape, folder)["gb_s"]
            warm.add("memcpy", shape, rate)
            again.add("memcpy", shape, rate)
    return [save, warm, cold, again, memory]


def _until(end: float, systems: Iterable[str]) -> Iterator[str]:
    """Yield the first two systems, and the others until a time of the monotonic clock."""
    for number, system in enumerate(systems):
        if number > 1 and time.monotonic() > end:
            print(f"no time for {system} and what follows", file=sys.stderr, flush=True)
            return
        yield system


def measure_s3(folder: Path, shapes: list[str], rounds: int) -> list[Table]:
    """Measure saving to and loading from `tools/s3d` on loopback."""
    save = Table("Save to S3", "GB/s", ["obstore"])
    load = Table("Load from S3", "GB/s", ["obstore"])
    extra = Table("Save to S3", "MiB beyond the tensors", ["obstore"], is_less_better=True)
    for number in range(rounds):
        for shape in shapes:
            # A new server for each round and shape, because its objects take disk space.
            with Server(profile="release") as server:
                for system, needs in S3_SYSTEMS.items():
                    uri = server.uri(f"{system}-{number}")
                    cell = [system, shape, str(folder), "--uri", uri]
                    figures = run_cell(CELL, needs, "save", *cell, env=server.env)
                    if system not in READERS:
                        save.add(system, shape, figures["gb_s"])
                        extra.add(system, shape, figures["extra_mib"])
                    load.add(system, shape, run_cell(CELL, needs, "load", *cell, env=server.env)["gb_s"])
    return [save, load, extra]


def main() -> None:
    """Measure, print tables, draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-ckpt"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="time of the part `disk`")
    parser.add_argument("--shapes", nargs="+", default=["model", "optimizer", "small"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], list[Table]]] = {
        "disk": lambda: measure(
            options.out, options.shapes, options.systems, options.rounds, minutes=options.minutes
        ),
        "small": lambda: ckpt_small.measure(options.out, options.rounds),
        "s3": lambda: measure_s3(options.out, options.shapes, options.rounds),
        "ranks": lambda: ckpt_ranks.measure(options.out, options.shapes, options.rounds),
        "async": lambda: ckpt_async.measure(options.out, options.shapes, options.rounds),
        "compressed": lambda: ckpt_compressed.measure(options.out),
        "weights": lambda: ckpt_weights.measure(options.out),
        "offline": lambda: ckpt_offline.measure(
            options.out,
            options.shapes,
            options.systems,
            options.rounds,
            lambda kind: fio(options.out, kind),
        ),
    }
    measure_parts(parts, options.parts, options.out / "ckpt.png")


if __name__ == "__main__":
    main()
