"""Progress display: a bar on a terminal, an occasional line elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hocket.ckpt.cli.text import size

__all__ = ["progress"]

_EVERY_S = 10.0


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
        yield _Lines(what)
        return
    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=out, transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """A progress line on standard error every ten seconds; short work prints none."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._said_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _EVERY_S:
                return
            self._said_at = now
        print(f"{self._what}: {size(done)} of {size(total)}", file=sys.stderr, flush=True)
