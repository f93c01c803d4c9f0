"""`hocket-ckpt reshard`."""

import threading
import time

from rich.text import Text

from hocket.ckpt.cli.convert import parse_size
from hocket.ckpt.read.opener import open_hocket
from hocket.ckpt.verbs.reshard import ReshardReport, reshard
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
    start_s = time.monotonic()
    manifest = open_hocket(source).manifest
    total, passed, lock = manifest.num_bytes, 0, threading.Lock()
    with progress("resharding", quiet=as_json) as on_progress:

        def on_file(_path: str, num_bytes: int) -> None:
            nonlocal passed
            with lock:
                passed += num_bytes
                on_progress(passed, total)

        resharded = reshard(
            source,
            destination,
            ranks=ranks,
            memory_bytes=parse_size(memory),
            compression=compression,
            unfenced=unfenced,
            on_file=on_file,
        )
    if as_json:
        print_json(_document(destination, resharded))
        return
    out = console()
    reused = (
        f" ({count(resharded.num_found, 'file')} of them from an earlier run)" if resharded.num_found else ""
    )
    files = count(len(resharded.manifest.files), "file")
    summary = f"step {resharded.manifest.step} for {count(ranks, 'rank')}"
    out.print(
        f"{destination}: {summary}, {size(total)} in {files}{reused}, {time.monotonic() - start_s:.1f} s"
    )
    if manifest.per_rank is not None and resharded.manifest.per_rank is None:
        out.print(Text(f"left out: what differed by rank, of {len(manifest.per_rank.ranks)} ranks", "yellow"))


def _document(uri: str, resharded: ReshardReport) -> dict[str, object]:
    return {
        "uri": uri,
        "save_id": resharded.manifest.save_id,
        "step": resharded.manifest.step,
        "ranks": resharded.manifest.world_size,
        "bytes": resharded.manifest.num_bytes,
        "files": len(resharded.manifest.files),
        "files_written": resharded.num_written,
        "files_found": resharded.num_found,
    }
