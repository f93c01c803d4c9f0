"""Reads of a checkpoint of 100,000 blocks, as a reshard reads it: files opened once, and once per read.

The data files are sparse (100 GiB of zeros that take no disk), so that only the reads cost time. A reshard
with 256 MiB of memory reads such a checkpoint in 3,200 calls. `per call` opens the checkpoint for every read,
which decodes the manifest with the digests of all files.

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

from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import TensorRecord
from hocket.native import _native

NUM_BLOCKS = 100_000
#: Smaller than the size from which files are read past the page cache, which is not measured here.
NUM_FILES = 2_000
PIECE_BYTES = 32 << 20
#: Reads in one measurement, distributed over the checkpoint.
NUM_READS = 200


def make_checkpoint(folder: Path) -> None:
    """Make sparse data files of zeros, each with one tensor, and their manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    block = _native.CKPT_BLOCK_BYTES
    digest = _native.xxh3_128(bytes(block))
    header = 4096
    num_blocks = NUM_BLOCKS // NUM_FILES
    data_bytes = num_blocks * block
    files: list[Any] = []
    tensors = {}
    for number in range(NUM_FILES):
        path = f"data/00000000-r{number:05d}-000.safetensors"
        with (folder / path).open("wb") as file:
            file.truncate(header + data_bytes)
        files.append(
            {
                "path": path,
                "size": header + data_bytes,
                "data_start": header,
                "header": base64.b64encode(_native.xxh3_128(bytes(header))).decode(),
                "digests": base64.b64encode(digest * num_blocks).decode(),
            }
        )
        chunk = Chunk(file=number, offset=0, length=data_bytes, start=(0,), size=(data_bytes,))
        name = f"t{number}"
        tensors[name] = TensorRecord(dtype="U8", shape=(data_bytes,), path=(name,), chunks=(chunk,))
    manifest = Manifest(
        save_id="0" * 32,
        step=0,
        created="2026-01-01T00:00:00.000000Z",
        version=_native.__version__,
        writer="bench",
        world_size=1,
        files=tuple(files),
        tensors=tensors,
    )
    (folder / "checkpoint.json.zst").write_bytes(_native.ckpt_manifest_encode(manifest.to_document()))


def reads() -> list[tuple[int, int, int]]:
    """Return the file, offset and number of bytes of each read of one measurement."""
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
    make_checkpoint(options.folder)
    uri, target = str(options.folder), np.zeros(PIECE_BYTES, np.uint8)
    seconds: dict[str, list[float]] = {"opened once": [], "per call": []}
    for _ in range(options.rounds):
        for way, figures in seconds.items():
            start = time.process_time()
            opened = _native.Checkpoint(uri)
            for file, offset, num_bytes in reads():
                if way == "per call":
                    opened = _native.Checkpoint(uri)
                opened.read_boxes([(f"t{file}", [offset], [num_bytes], target.ctypes.data, None)])
            figures.append((time.process_time() - start) / NUM_READS * 1e3)
    for way, figures in seconds.items():
        spread = f"[{min(figures):.2f}..{max(figures):.2f}]"
        print(f"{way:14}{statistics.median(figures):8.2f} ms of processor time a read of 32 MiB {spread}")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
