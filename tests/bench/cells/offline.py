"""One cell of `tests/bench/ckpt_offline.py`: one system rewrites or verifies a checkpoint in one process.

Prints one JSON object. The source is in the page cache, or on the disk alone with `--cold`; the written
files are flushed at the end, and imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from states import forget_peak, peak_kib, sync, warm_memory

Act = Callable[[], object]
NUM_MERGED = 3


def torch_hocket(source: Path, target: Path) -> Act:
    """Convert DCP's checkpoint to a file for `torch.load`."""
    from hocket.ckpt.verbs.convert import convert

    return lambda: convert(str(source / "dcp"), str(target / "state.pt"), to="torch")


def torch_dcp(source: Path, target: Path) -> Act:
    """Convert as `torch_hocket`, with torch's own function."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def act() -> None:
        dcp_to_torch_save(source / "dcp", target / "state.pt")
        sync(target)

    return act


def safetensors_hocket(source: Path, target: Path) -> Act:
    """Join the shards of DCP's Hugging Face writer to one file of whole tensors."""
    from hocket.ckpt.verbs.convert import convert

    return lambda: convert(
        str(source / "hf"), str(target / "whole"), to="safetensors", max_shard_bytes=1 << 40
    )


def safetensors_dcp(source: Path, target: Path) -> Act:
    """Join shards as `safetensors_hocket`, with torch's own function."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    with safe_open(next((source / "hf").glob("*.safetensors")), "pt") as shard:
        file_indices = dict.fromkeys(shard.keys(), 1)

    def act() -> None:
        consolidate_safetensors_files(str(source / "hf"), str(target), file_indices, num_threads=2)
        sync(target)

    return act


def reshard_hocket(source: Path, target: Path) -> Act:
    """Reshard from two ranks to three."""
    from hocket.ckpt.verbs.reshard import reshard

    return lambda: reshard(str(source / "checkpoint"), str(target / "checkpoint"), ranks=3)


def merge_hocket(source: Path, target: Path) -> Act:
    """Average three checkpoints of two ranks, which are copies of one, into one of Hocket's format."""
    from hocket.ckpt.verbs.merge import merge

    copies = [target / "sources" / str(number) for number in range(NUM_MERGED)]
    for copy in copies:
        shutil.copytree(source / "checkpoint", copy)
    return lambda: merge(copies, target / "merged", to="hocket")


def verify_hocket(source: Path, target: Path) -> Act:
    """Verify every block against its digest."""
    from hocket.ckpt.verbs.verify import verify

    def act() -> None:
        if not verify(str(source / "checkpoint")).is_sound:
            raise SystemExit(f"{source} is not sound")

    return act


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["torch", "safetensors", "reshard", "merge", "verify"])
    parser.add_argument("system", choices=["hocket", "dcp"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--cold", action="store_true", help="drop the page cache first (needs root)")
    options = parser.parse_args()
    shutil.rmtree(options.target, ignore_errors=True)
    options.target.mkdir(parents=True)
    act: Act = globals()[f"{options.work}_{options.system}"](options.source, options.target)
    read = options.target / "sources" if options.work == "merge" else options.source
    size = sum(len(path.read_bytes()) for path in read.rglob("*") if path.is_file())
    os.sync()
    if options.cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    warm_memory()
    forget_peak()
    before = peak_kib()
    cpu, start = time.process_time(), time.perf_counter()
    act()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    grown = peak_kib() - before
    shutil.rmtree(options.target)
    figures = {
        "seconds": seconds, "gb_s": size / seconds / 1e9, "gb_cpu_s": size / cpu / 1e9,
        "extra_mib": grown / 1024,
    }  # fmt: skip
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
