"""A bar for a writer, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn


class ShardProgress:
    """Shards stored and bytes written so far; how many will come nobody knows.

    Args:
        uri: Where they go.
    """

    def __init__(self, uri: str) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[stored]} of {task.fields[shards]} shards stored"),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(uri, total=None, stored=0, shards=0)
        self._bar.start()

    def update(self, stored: int, shards: int, num_bytes: int) -> None:
        """Show so many shards stored of those closed, and count the bytes of the one just closed."""
        self._bar.update(self._task, advance=num_bytes, stored=stored, shards=shards)

    def close(self) -> None:
        """Leave the last line standing."""
        self._bar.stop()
