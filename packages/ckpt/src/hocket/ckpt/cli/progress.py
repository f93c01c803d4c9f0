"""How far long work is: a bar on a terminal, nothing elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

__all__ = ["progress"]


@contextlib.contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be called with the bytes done and the bytes of all.

    Args:
        what: The work, as in `converting`.
        quiet: Show nothing on a terminal either.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
