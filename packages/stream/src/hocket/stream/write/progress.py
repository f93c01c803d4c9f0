"""Progress of a writer: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from hocket.native.cli.progress import ProgressLines


class ShardProgress:
    """A display of the shards stored and the bytes written so far. The total is not known.

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
