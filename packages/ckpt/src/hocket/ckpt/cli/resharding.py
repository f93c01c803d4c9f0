"""`hocket-ckpt reshard`."""

import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hocket.ckpt.cli.text import console, count, print_json, size
from hocket.ckpt.reader import open  # noqa: A004 - this package's own
from hocket.ckpt.resharding import Resharded, reshard

__all__ = ["parse_size", "show"]

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Elsewhere than on a terminal, a line for each so much of the work.
_SAID_PARTS = 10


def parse_size(text: str) -> int:
    """Bytes of `512MiB` or `4GiB`.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]iB)", text.strip())
    if found is None:
        raise ValueError(f"`--memory` is `{text}`; expected a number and a unit, such as 512MiB or 4GiB")
    return int(found[1]) * _UNITS[found[2]]


def show(
    source: str, destination: str, *, ranks: int, memory: str, compression: str | None, as_json: bool
) -> None:
    """Reshards a checkpoint and says what was done."""
    began = time.monotonic()
    out = console()
    run = partial(
        reshard, source, destination, ranks=ranks, memory_bytes=parse_size(memory), compression=compression
    )
    if as_json:
        done = run()
        print_json(_document(destination, done))
        return
    total = open(source).manifest.num_bytes
    if sys.stdout.isatty():
        done = _with_progress(run, total, out)
    else:
        said = _Said(out, total)
        done = run(on_file=said)
    found = f" ({count(done.num_found, 'file')} of them from an earlier run)" if done.num_found else ""
    files = count(len(done.manifest.files), "file")
    what = f"step {done.manifest.step} for {count(ranks, 'rank')}"
    out.print(f"{destination}: {what}, {size(total)} in {files}{found}, {time.monotonic() - began:.1f} s")


def _with_progress(run: Callable[..., Resharded], total: int, out: Console) -> Resharded:
    bar = Progress(
        TextColumn("resharding"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=out, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)

        def on_file(_path: str, num_bytes: int) -> None:
            bar.advance(task, num_bytes)

        return run(on_file=on_file)


class _Said:
    """Says how far it is, now and then; called from several threads."""

    def __init__(self, out: Console, total: int) -> None:
        self._out = out
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, path: str, num_bytes: int) -> None:
        with self._lock:
            before, self._done = self._done, self._done + num_bytes
            if before * _SAID_PARTS // self._total != self._done * _SAID_PARTS // self._total:
                self._out.print(f"resharding: {size(self._done)} of {size(self._total)}")


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
