"""`Destination`: the methods that receive what a `Logger` logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch


class Destination:
    """A receiver of everything that a `Logger` logs; `LoggerDestination` adds the events of a callback.

    The methods run on a thread of the destination's own, or on one that quick destinations share, in the
    order of the calls. Every method has an empty default.

    Attributes:
        shares_thread: Whether its methods return within microseconds, wait for no network, and do not change
            their arguments. Such destinations share one queue and one thread. A subclass does not inherit
            this attribute, because it may be slow where its base is not.
        rank_zero_only: Whether only rank 0 has this destination. Set it to False where every rank writes to
            a place of its own.
        queue_capacity: Calls of `log_metrics` that may wait for this destination.
        media_capacity: Calls of `log_images`, `log_table` and `log_traces` that may wait; further ones are
            dropped and counted.
    """

    shares_thread: bool = False
    rank_zero_only: bool = True
    queue_capacity: int = 4096
    media_capacity: int = 64

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Receive the numbers of a step.

        Args:
            metrics: Numbers by name; a tensor that is not a scalar arrives as nested lists.
            step: Batches trained on when they were logged.
        """

    def after_delivery(self) -> None:
        """Write out buffered values; called after a series of `log_*` calls, on the same thread."""

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Receive the settings of the run."""

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Receive a table.

        Args:
            columns: The column names.
            rows: One sequence of values per row, in the order of `columns`.
            name: The table's name.
            step: Batches trained on when it was logged.
        """

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Receive images, on the host and in one layout.

        Args:
            images: 8-bit images with their masks.
            name: The name they were logged under.
            step: Batches trained on when they were logged.
        """

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Receive reports of algorithms by name, such as what an algorithm changed."""

    def can_upload_files(self) -> bool:
        """Return whether `upload_file` stores files."""
        return False

    def upload_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store a file with the run.

        Args:
            remote_file_name: The name to store it under; may contain `/`.
            file_path: The file on this machine.
            overwrite: Whether to replace a stored file of that name.
        """

    def download_file(self, remote_file_name: str, destination: str, *, overwrite: bool = False) -> None:
        """Fetch a file stored with the run. Called directly, on the caller's thread.

        Args:
            remote_file_name: The name it was stored under.
            destination: The path to write.
            overwrite: Whether to replace a file at `destination`.

        Raises:
            NotImplementedError: If the destination stores no files.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` stores no files, so there is no `{remote_file_name}` to download"
        )
