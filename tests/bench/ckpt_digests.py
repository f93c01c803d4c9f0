"""Reads of a checkpoint of 100,000 blocks, as a reshard reads it: files opened once, and once per read.

The data files are sparse (100 GiB of zeros that take no disk), so that only the reads cost time. A reshard
with 256 MiB of memory reads such a checkpoint in 3,200 calls. `per call` makes a `CkptFiles` for every read,
which copies and decodes the digests of all files, as earlier versions did.

Run it with `uv run python tests/bench/ckpt_digests.py --folder out/digests`, on a file system with holes.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from hocket.native import _native

NUM_BLOCKS = 100_000
#: Smaller than the size from which files are read past the page cache, which is not measured here.
NUM_FILES = 2_000
PIECE_BYTES = 32 << 20
#: Reads in one measurement, distributed over the checkpoint.
NUM_READS = 200


def make_files(folder: Path) -> list[Any]:
    """Make sparse data files of zeros, and their records with digests."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    block = _native.CKPT_BLOCK_BYTES
    digest = _native.xxh3_128(bytes(block))
    header = 4096
    num_blocks = NUM_BLOCKS // NUM_FILES
    files = []
    for number in range(NUM_FILES):
        path = f"data/00000000-r{number:05d}-000.safetensors"
        size = header + num_blocks * block
        with (folder / path).open("wb") as file:
            file.truncate(size)
        files.append(
            {
                "path": path,
                "size": size,
                "data_start": header,
                "header": base64.b64encode(_native.xxh3_128(bytes(header))).decode(),
                "digests": base64.b64encode(digest * num_blocks).decode(),
            }
        )
    return files


def reads() -> list[tuple[int, int, int]]:
    """Return file, offset and bytes of the reads of one measurement."""
    data_bytes = NUM_BLOCKS // NUM_FILES * _native.CKPT_BLOCK_BYTES
    offsets = range(0, data_bytes - PIECE_BYTES, PIECE_BYTES)
    places = [(number % NUM_FILES, offset) for number, offset in enumerate(offsets)]
    return [
        (file, offset, PIECE_BYTES) for file, offset in (places * (NUM_READS // len(places) + 1))[:NUM_READS]
    ]


def main() -> None:
    """Measure both ways alternately and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/digests"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    files = make_files(options.folder)
    uri, target = str(options.folder), np.zeros(PIECE_BYTES, np.uint8)
    seconds: dict[str, list[float]] = {"opened once": [], "per call": []}
    for _ in range(options.rounds):
        for way, figures in seconds.items():
            start = time.process_time()
            opened = _native.CkptFiles(uri, files)
            for file, offset, num_bytes in reads():
                if way == "per call":
                    opened = _native.CkptFiles(uri, files)
                opened.read([(file, offset, num_bytes, target.ctypes.data)])
            figures.append((time.process_time() - start) / NUM_READS * 1e3)
    for way, figures in seconds.items():
        spread = f"[{min(figures):.2f}..{max(figures):.2f}]"
        print(f"{way:14}{statistics.median(figures):8.2f} ms of processor time a read of 32 MiB {spread}")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
