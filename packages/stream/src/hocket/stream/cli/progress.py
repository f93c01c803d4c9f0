"""Progress of work whose total is known: a bar on a terminal, an occasional line elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hocket.stream.cli.text import size
from hocket.stream.progress import ProgressLines

__all__ = ["progress"]


@contextlib.contextmanager
def progress(what: str, *, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes done since its last call.

    Args:
        what: Description of the work, such as `verifying`.
        total: Total bytes.
        quiet: Show nothing.
    """
    if quiet:
        yield lambda _done: None
        return
    if not sys.stderr.isatty():
        lines, read = ProgressLines(), 0

        def advance(done: int) -> None:
            nonlocal read
            read += done
            lines.print(f"{what}: {size(read)} of {size(total)}")

        yield advance
        return
    # Redirecting stdout would send lines for a file or pipe to the bar on stderr.
    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
