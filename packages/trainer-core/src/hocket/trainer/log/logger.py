"""`Logger`: hands what a run logs to its destinations."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hocket.trainer.errors import LoggerError
from hocket.trainer.log.deferred_value import capture
from hocket.trainer.log.destination import Destination
from hocket.trainer.log.log_queue import LogQueue, LogReceiver, raise_first
from hocket.trainer.log.logged_images import capture_images
from hocket.trainer.process.world import global_rank
from hocket.trainer.timestamp import Counts

_log = logging.getLogger(__name__)


class _HasCounts(Protocol):
    @property
    def counts(self) -> Counts: ...


class Logger:
    """The log of a run: hands values to its destinations, without waiting for a device or a destination.

    Args:
        state: Its `counts` give the step of values that are logged without one.
        destinations: The receivers; those for rank 0 only are left out on other ranks.
    """

    def __init__(self, state: _HasCounts, destinations: Iterable[Destination] = ()) -> None:
        self._state = state
        rank = global_rank()
        self.destinations: tuple[Destination, ...] = tuple(
            destination for destination in destinations if rank == 0 or not destination.rank_zero_only
        )
        """The destinations on this rank."""
        self._outlets = _make_outlets(self.destinations)
        """The queue and the receiver of each destination."""
        self.queues = list(dict.fromkeys(queue for queue, _ in self._outlets))
        """The queues of all destinations; `log_metrics` puts the captured values into each."""
        self._media_room = [
            threading.BoundedSemaphore(destination.media_capacity) for destination in self.destinations
        ]
        self._num_media_dropped = [0] * len(self.destinations)

    def __repr__(self) -> str:
        names = ", ".join(type(destination).__name__ for destination in self.destinations)
        return f"<Logger: {names or 'no destination'}, at batch {self._state.counts.batch}>"

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        *,
        keep: bool = False,
        to: Sequence[Destination] | None = None,
    ) -> None:
        """Log values as they are now. Waits for nothing.

        Args:
            metrics: By name: numbers, tensors (of any device), or handles with `wait()`.
            step: The step they belong to; the batches trained on by default.
            keep: Never drop them, however slow a destination is: for values of an epoch or an evaluation.
            to: The destinations that get them; all by default.

        Raises:
            TypeError: If a value is no number, tensor or handle.
        """
        if not self.queues or not metrics:
            return
        values, resolved_step = capture(metrics), self._step(step)
        if to is None:
            for queue in self.queues:
                queue.put(values, resolved_step, keep=keep)
            return
        for (queue, receiver), destination in zip(self._outlets, self.destinations, strict=True):
            if destination in to:
                queue.put(values, resolved_step, keep=keep, to=(receiver,))

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log the settings of the run; never dropped."""
        settings = dict(parameters)
        for (queue, receiver), destination in zip(self._outlets, self.destinations, strict=True):
            queue.call(partial(destination.log_hyperparameters, dict(settings)), receiver)

    def log_table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        name: str = "Table",
        step: int | None = None,
    ) -> None:
        """Log a table of plain values.

        Args:
            columns: The column names.
            rows: One sequence of values per row, in the order of `columns`.
            name: The table's name.
            step: The step it belongs to; the batches trained on by default.

        Raises:
            LoggerError: If a row has another number of values than there are columns.
        """
        if not self.queues:
            return
        column_names, table, resolved_step = list(columns), [list(row) for row in rows], self._step(step)
        for row in table:
            if len(row) != len(column_names):
                raise LoggerError(
                    f"a row of the table `{name}` has {len(row)} values; expected {len(column_names)}, one "
                    "for each column"
                )
        self._call_media(lambda destination: destination.log_table(column_names, table, name, resolved_step))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        *,
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Log images as they are now. Does not wait for the device.

        Args:
            images: A batch `(N, C, H, W)`, one image `(C, H, W)` or `(H, W)`, or a sequence of images.
            name: The name to show them under.
            channels_last: Whether the channels are the last dim.
            step: The step they belong to; the batches trained on by default.
            masks: By name, `(N, H, W)` class numbers to draw over the images.
            mask_class_labels: Class names by class number.
            use_table: Whether to show them as a table, where the destination has tables.

        Raises:
            LoggerError: If the shapes are not those of images.
        """
        if not self.queues:
            return
        resolved_step = self._step(step)
        read_images = capture_images(
            images,
            channels_last=channels_last,
            masks=masks,
            mask_class_labels=mask_class_labels,
            use_table=use_table,
        )
        self._call_media(lambda destination: destination.log_images(read_images(), name, resolved_step))

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log reports of algorithms by name."""
        copied_traces = dict(traces)
        self._call_media(lambda destination: destination.log_traces(copied_traces))

    def upload_file(
        self, remote_file_name: str, file_path: str | os.PathLike[str], *, overwrite: bool = False
    ) -> None:
        """Store a file with every destination that keeps files. Does not wait; never dropped.

        Args:
            remote_file_name: The name to store it under; `{run_name}` and `{rank}` are not replaced.
            file_path: The file, which must stay until the logger is closed.
            overwrite: Whether to replace a stored file of that name.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        path = Path(file_path)
        if not path.exists():
            raise FileNotFoundError(f"`{path}` does not exist, so it cannot be uploaded")
        for (queue, receiver), destination in zip(self._outlets, self.destinations, strict=True):
            if destination.can_upload_files():
                upload = partial(destination.upload_file, remote_file_name, path, overwrite=overwrite)
                queue.call(upload, receiver)

    def has_file_destination(self) -> bool:
        """Return whether a destination on this rank stores files."""
        return any(destination.can_upload_files() for destination in self.destinations)

    def _step(self, step: int | None) -> int:
        return self._state.counts.batch if step is None else int(step)

    def _call_media(self, call: Callable[[Destination], None]) -> None:
        """Queue `call` for every destination that has room for more images and tables."""
        for index, destination in enumerate(self.destinations):
            queue, receiver = self._outlets[index]
            room = self._media_room[index]
            if not room.acquire(blocking=False):
                self._num_media_dropped[index] += 1
                continue
            queue.call(partial(_call_and_release, call, destination, room), receiver)

    def call(self, destination: Destination, function: Callable[[], None]) -> None:
        """Call `function` on the thread of `destination`, after everything that was logged to it so far.

        With it a destination can act at an event of the training after it has received every number logged
        before. On a rank without the destination nothing happens.
        """
        for (queue, receiver), other in zip(self._outlets, self.destinations, strict=True):
            if other is destination:
                queue.call(function, receiver)

    def flush(self, timeout_s: float = 30.0, *, to: Destination | None = None) -> bool:
        """Wait until the destinations have received what was logged so far.

        Args:
            timeout_s: Seconds for all of them together.
            to: The only destination to wait for; all by default.

        Returns:
            False when `timeout_s` was not enough.
        """
        deadline = time.monotonic() + timeout_s
        queues = self.queues
        if to is not None:
            queues = [
                queue
                for (queue, _), destination in zip(self._outlets, self.destinations, strict=True)
                if destination is to
            ]
        done = [queue.flush(max(0.0, deadline - time.monotonic())) for queue in queues]
        return all(done)

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over the remaining values and end the threads.

        The engine calls it between the destinations' `close` and `post_close`.

        Args:
            timeout_s: Seconds for all destinations together.

        Raises:
            LoggerError: If a destination failed at any time; if several did, the first one's error, with
                notes on the others.
        """
        deadline = time.monotonic() + timeout_s
        errors: list[LoggerError] = []
        for queue in self.queues:
            try:
                queue.close(max(0.0, deadline - time.monotonic()))
            except LoggerError as error:
                errors.append(error)
        for destination, dropped in zip(self.destinations, self._num_media_dropped, strict=True):
            if dropped:
                _log.warning(
                    "`%s` was too slow: %d images or tables were dropped; log them less often",
                    type(destination).__name__,
                    dropped,
                )
        self._num_media_dropped = [0] * len(self.destinations)
        raise_first(errors)


def _make_outlets(destinations: Sequence[Destination]) -> list[tuple[LogQueue, LogReceiver]]:
    """Make the queues: one for all destinations that share a thread, and one for each of the others."""
    receivers = [
        LogReceiver(destination.log_metrics, type(destination).__name__, destination.after_delivery)
        for destination in destinations
    ]
    # Looked up in the class itself: a subclass may be slow where its base is not.
    shares_thread = [bool(type(destination).__dict__.get("shares_thread")) for destination in destinations]
    shared_receivers = [
        receiver for receiver, is_shared in zip(receivers, shares_thread, strict=True) if is_shared
    ]
    capacities = [
        destination.queue_capacity
        for destination, is_shared in zip(destinations, shares_thread, strict=True)
        if is_shared
    ]
    shared = LogQueue(*shared_receivers, capacity=min(capacities)) if shared_receivers else None
    return [
        (
            shared if is_shared and shared else LogQueue(receiver, capacity=destination.queue_capacity),
            receiver,
        )
        for receiver, destination, is_shared in zip(receivers, destinations, shares_thread, strict=True)
    ]


def _call_and_release(
    call: Callable[[Destination], None],
    destination: Destination,
    room: threading.BoundedSemaphore,
) -> None:
    try:
        call(destination)
    finally:
        room.release()
