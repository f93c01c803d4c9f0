"""The time and memory of planning for a job of 1,024 ranks and a manifest of 10⁶ chunks, without the ranks.

One process acts as one rank, or as each in turn: plans are computed without communication. Each row runs in a
process of its own, and its memory is the peak beyond the imports.

Run it with `uv run python tests/bench/ckpt_planning.py`; it takes some minutes. Only manifests are read.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

RANKS = 1024
TENSORS = 1024
ROWS = 8192
COLUMNS = 64
ROUNDS = 3


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


@contextlib.contextmanager
def stored_manifest(document: bytes) -> Iterator[str]:
    """Store a manifest in a temporary folder during the block."""
    from hocket.native import _native

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checkpoint.json.zst").write_bytes(_native.ckpt_manifest_encode(document))
        yield folder


def manifest_document(num_tensors: int, num_ranks: int) -> bytes:
    """Return a manifest whose tensors are sharded on dim 0 over the ranks, with one file a rank."""
    rows = ROWS // num_ranks
    chunk_bytes = rows * COLUMNS * 4
    digest = "A" * 22 + "=="
    blocks = -(-num_tensors * chunk_bytes // (1 << 20))
    import base64

    file = {"size": 4096 + num_tensors * chunk_bytes, "data_start": 4096, "header": digest}
    file["digests"] = base64.b64encode(bytes(16 * blocks)).decode()
    files = [{"path": f"data/01234567-r{rank:05d}-000.safetensors", **file} for rank in range(num_ranks)]
    tensors = {
        f"layers.{number}.weight": {
            "dtype": "F32", "shape": [rows * num_ranks, COLUMNS], "path": ["layers", number, "weight"],
            "chunks": {
                "file": list(range(num_ranks)), "offset": [number * chunk_bytes] * num_ranks,
                "length": [chunk_bytes] * num_ranks,
                "start": [[rank * rows for rank in range(num_ranks)], [0] * num_ranks],
                "size": [[rows] * num_ranks, [COLUMNS] * num_ranks],
            },
        }
        for number in range(num_tensors)
    }  # fmt: skip
    document = {
        "format": 1, "version": "0.1.0", "save_id": "0123456789abcdef" * 2, "step": 1,
        "created": "2026-01-01T00:00:00.000000Z", "writer": "bench", "world_size": num_ranks, "mesh": None,
        "files": files, "tensors": tensors, "values": {}, "per_rank": None, "user": None,
    }  # fmt: skip
    return json.dumps(document, separators=(",", ":")).encode()


def timed(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        gc.collect()
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def save_plan() -> Iterator[tuple[str, float]]:
    """Plan, for one rank, a save of 1,024 tensors that 1,024 ranks hold."""
    from hocket.ckpt.document import planning
    from hocket.ckpt.document.planning import PlannedTensor, TensorPlacement, plan_parts

    placings = {
        "FSDP": TensorPlacement((RANKS,), tuple(range(RANKS)), (0,)),
        "HSDP, 4 replicas": TensorPlacement((4, RANKS // 4), tuple(range(RANKS)), (None, 0)),
    }
    for name, placing in placings.items():
        items = [PlannedTensor(f"t{number}", (ROWS, COLUMNS), 4, placing) for number in range(TENSORS)]

        def plan(items: list[PlannedTensor] = items) -> None:
            planning.boxes.cache_clear()
            planning._box_at.cache_clear()
            plan_parts(items, RANKS, 5)

        yield f"plan of a save, one rank of {RANKS:,}, {TENSORS:,} tensors, {name}", timed(plan)


def load_plan() -> Iterator[tuple[str, float]]:
    """Plan the reads of one of 1,024 ranks from a checkpoint of 1,024 ranks, as a load does.

    There are no data files, so each read ends once it is planned.
    """
    import numpy as np

    from hocket.ckpt.document.planning import TensorPlacement, local_box
    from hocket.ckpt.errors import CheckpointNotFoundError
    from hocket.native import _native

    placing = TensorPlacement((RANKS,), tuple(range(RANKS)), (0,))
    box = local_box((ROWS, COLUMNS), placing, 7)
    assert box is not None
    memory = np.empty(box.size, np.float32)
    with stored_manifest(manifest_document(TENSORS, RANKS)) as folder:
        opened = _native.Checkpoint(folder)
        boxes = [
            (f"layers.{number}.weight", box.start, box.size, memory.ctypes.data, None)
            for number in range(TENSORS)
        ]

        def plan() -> None:
            try:
                opened.read_boxes(boxes)
            except CheckpointNotFoundError:
                return
            raise AssertionError("there are data files")

        yield f"plan of a load, one rank of {RANKS:,}, a checkpoint of {RANKS:,} ranks", timed(plan)


def open_manifest() -> Iterator[tuple[str, float]]:
    """Decode a manifest of 10⁶ chunks to its records."""
    from hocket.ckpt.document.manifest import Manifest
    from hocket.native import _native

    document = manifest_document(1_000_000 // RANKS + 1, RANKS)
    num_chunks = RANKS * (1_000_000 // RANKS + 1)
    stored = _native.ckpt_manifest_encode(document)
    label = (
        f"manifest of {num_chunks:,} chunks, {len(stored) / 1e6:.2f} MB, {len(document) / 1e6:.0f} MB of JSON"
    )
    yield f"{label}: encode", timed(lambda: _native.ckpt_manifest_encode(document))
    yield f"{label}: decode and check", timed(lambda: _native.ckpt_manifest_decode(stored))
    with stored_manifest(document) as folder:
        yield f"{label}: read", timed(lambda: Manifest.read(folder))


PHASES = {phase.__name__: phase for phase in (save_plan, load_plan, open_manifest)}


def main() -> None:
    """Run each phase in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--phase", choices=PHASES)
    phase = parser.parse_args().phase
    if phase is not None:
        import hocket.ckpt  # noqa: F401 - what follows is beyond the imports

        before = peak_bytes()
        rows = list(PHASES[phase]())
        print(json.dumps({"rows": rows, "peak": peak_bytes() - before}))
        return
    print(f"{'':96}{'seconds':>10}{'MiB':>8}")
    for name in PHASES:
        completed = subprocess.run(
            [sys.executable, __file__, "--phase", name],
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
        )
        report = json.loads(completed.stdout)
        for label, seconds in report["rows"]:
            print(f"{label:96}{seconds:10.3f}")
        print(
            f"{'  peak memory of these, with what they are made from':96}{'':10}{report['peak'] / 2**20:8.0f}"
        )


if __name__ == "__main__":
    main()
