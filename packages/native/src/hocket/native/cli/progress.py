"""Progress on standard error: a bar on a terminal, an occasional line elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hocket.native.cli.text import size

__all__ = ["EVERY_S", "ProgressLines", "progress"]

EVERY_S = 10.0
"""Seconds between two lines."""


class ProgressLines:
    """A printer of at most one line every ten seconds; short work prints none. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._printed_at = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line, unless one was printed in the last ten seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._printed_at < EVERY_S:
                return
            self._printed_at = now
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: str, *, quiet: bool, out: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the bytes done and the total bytes, from any thread.

    Args:
        what: The work, such as `converting`.
        quiet: Show nothing.
        out: The console for the bar, which may print other lines meanwhile; None for standard error.
    """
    out = out or Console(stderr=True)
    if quiet:
        yield lambda _done, _total: None
        return
    if not out.is_terminal:
        lines = ProgressLines()
        yield lambda done, total: lines.print(f"{what}: {size(done)} of {size(total)}")
        return
    # A redirected stdout would send lines for a file or pipe to the bar on stderr.
    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=out, transient=True, redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
