"""Progress on standard error: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

EVERY_S = 10.0


class ProgressLines:
    """Prints a line every ten seconds; short work prints none. Safe from several threads."""

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


class ShardProgress:
    """Shows the shards stored and the bytes written so far. The total is not known.

    Args:
        uri: The output location, shown beside the progress.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lines = ProgressLines()
        self._num_bytes = 0
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if not console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[stored]} of {task.fields[shards]} shards stored"),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(uri, total=None, stored=0, shards=0)
        self._bar.start()

    def update(self, stored: int, shards: int, num_bytes: int) -> None:
        """Update the number of stored shards and of closed shards, and add the bytes of a closed shard."""
        if self._bar is not None:
            self._bar.update(self._task, advance=num_bytes, stored=stored, shards=shards)
            return
        self._num_bytes += num_bytes
        written = f"{self._num_bytes / (1 << 20):,.1f} MiB"
        self._lines.print(f"{self._uri}: {stored} of {shards} shards stored, {written} written")

    def close(self) -> None:
        """Stop the bar; its last line stays."""
        if self._bar is not None:
            self._bar.stop()
