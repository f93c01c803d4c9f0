"""`hocket-ckpt reshard`."""

import threading
import time

from rich.text import Text

from hocket.ckpt.cli.converting import parse_size
from hocket.ckpt.opener import open_hocket
from hocket.ckpt.resharding import Resharded, reshard
from hocket.native.cli.progress import progress
from hocket.native.cli.text import console, count, print_json, size

__all__ = ["show"]


def show(
    source: str,
    destination: str,
    *,
    ranks: int,
    memory: str,
    compression: str | None,
    unfenced: bool,
    as_json: bool,
) -> None:
    """Reshard a checkpoint and print the result."""
    began = time.monotonic()
    manifest = open_hocket(source).manifest
    total, passed, lock = manifest.num_bytes, 0, threading.Lock()
    with progress("resharding", quiet=as_json) as on_progress:

        def on_file(_path: str, num_bytes: int) -> None:
            nonlocal passed
            with lock:
                passed += num_bytes
                on_progress(passed, total)

        done = reshard(
            source,
            destination,
            ranks=ranks,
            memory_bytes=parse_size(memory),
            compression=compression,
            unfenced=unfenced,
            on_file=on_file,
        )
    if as_json:
        print_json(_document(destination, done))
        return
    out = console()
    found = f" ({count(done.num_found, 'file')} of them from an earlier run)" if done.num_found else ""
    files = count(len(done.manifest.files), "file")
    what = f"step {done.manifest.step} for {count(ranks, 'rank')}"
    out.print(f"{destination}: {what}, {size(total)} in {files}{found}, {time.monotonic() - began:.1f} s")
    if manifest.per_rank is not None and done.manifest.per_rank is None:
        out.print(Text(f"left out: what differed by rank, of {len(manifest.per_rank.ranks)} ranks", "yellow"))


def _document(uri: str, done: Resharded) -> dict[str, object]:
    return {
        "uri": uri,
        "save_id": done.manifest.save_id,
        "step": done.manifest.step,
        "ranks": done.manifest.world_size,
        "bytes": done.manifest.num_bytes,
        "files": len(done.manifest.files),
        "files_written": done.num_written,
        "files_found": done.num_found,
    }
