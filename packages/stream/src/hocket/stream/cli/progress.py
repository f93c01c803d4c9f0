"""How far long work is: a bar on a terminal, nothing elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

__all__ = ["progress"]


@contextlib.contextmanager
def progress(what: str, *, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to be called with the bytes done since the last call.

    Args:
        what: The work, as in `verifying`.
        total: Bytes of all of it.
        quiet: Show nothing on a terminal either.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done: None
        return
    # Lines for a file or a pipe must not be drawn above the bar, which is on standard error.
    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
