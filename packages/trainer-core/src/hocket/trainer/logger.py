"""`Logger`, which the training logs to, and `LoggerDestination`, which takes the numbers somewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.capture import Number, capture
from hocket.trainer.errors import LoggerError
from hocket.trainer.metrics import MetricsQueue
from hocket.trainer.timestamp import Timestamp


def num_ranks() -> int:
    """How many processes train together: of the process group, else by `WORLD_SIZE`, else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank: of the process group if there is one, else by the environment's `RANK`, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class LoggerDestination(Callback):
    """A place that takes numbers: a file, a console, a tracking service.

    It is a callback too, and hears every event on the training's thread. The `log_*` methods are called on a
    thread of the destination's own, in order, with numbers only: to be slow there does not slow the training,
    but a destination far too slow loses points of single steps (see `MetricsQueue`). Numbers still arrive
    after `close`; what holds a file or a connection lets go of it in `post_close`, when all have.

    Attributes:
        rank_zero_only: Whether only rank 0 gets numbers; set it to false where every rank has its own place.
        queue_capacity: How many calls of `log_metrics` may be waiting for this destination.
    """

    rank_zero_only: bool = True
    queue_capacity: int = 4096

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Take the numbers of a step.

        Args:
            metrics: Numbers by name; a tensor that is no scalar comes as nested lists.
            step: Batches trained on when they were logged.
        """

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Take the settings of the run."""


class _HasTimestamp(Protocol):
    @property
    def timestamp(self) -> Timestamp: ...


class Logger:
    """Hands what the training logs to its destinations, without ever waiting for a device or a destination.

    Args:
        state: Its `timestamp` gives the step of what is logged without one.
        destinations: Where to; those for rank 0 only are left out on other ranks.
    """

    def __init__(self, state: _HasTimestamp, destinations: Iterable[LoggerDestination] = ()) -> None:
        self._state = state
        rank = global_rank()
        self.destinations: tuple[LoggerDestination, ...] = tuple(
            destination for destination in destinations if rank == 0 or not destination.rank_zero_only
        )
        """The destinations that get something on this rank."""
        self._queues = [
            MetricsQueue(
                destination.log_metrics, type(destination).__name__, capacity=destination.queue_capacity
            )
            for destination in self.destinations
        ]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, *, keep: bool = False) -> None:
        """Log values as they are now. Waits for nothing.

        Args:
            metrics: By name: numbers, tensors (of any device), or handles with `wait()`.
            step: The step they belong to; the batches trained on by default.
            keep: Never drop them, however slow a destination is: for values of an epoch or an evaluation.

        Raises:
            TypeError: If a value is no number, tensor or handle.
        """
        if not self._queues or not metrics:
            return
        values = capture(metrics)
        at = self._state.timestamp.counts.batch if step is None else int(step)
        for queue in self._queues:
            queue.put(values, at, keep=keep)

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log the settings of the run; never dropped."""
        settings = dict(parameters)
        for queue, destination in zip(self._queues, self.destinations, strict=True):
            queue.call(partial(destination.log_hyperparameters, dict(settings)))

    def call(self, destination: LoggerDestination, function: Callable[[], None]) -> None:
        """Have `function` called on the thread of `destination`, after what was logged to it so far.

        For destinations: what they do at an event of the training then sees every number logged before it.
        Nothing happens where the destination gets nothing, such as on other ranks than 0.
        """
        for queue, other in zip(self._queues, self.destinations, strict=True):
            if other is destination:
                queue.call(function)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until the destinations have what was logged so far; false when `timeout_s` was not enough."""
        deadline = time.monotonic() + timeout_s
        done = [queue.flush(max(0.0, deadline - time.monotonic())) for queue in self._queues]
        return all(done)

    def close(self, timeout_s: float = 30.0) -> None:
        """Hand over what is left and end the threads.

        The engine calls it between the destinations' `close` and `post_close`.

        Args:
            timeout_s: For all destinations together.

        Raises:
            LoggerError: If a destination failed at any time; with several, the first, and notes on the
                others.
        """
        deadline = time.monotonic() + timeout_s
        errors: list[LoggerError] = []
        for queue in self._queues:
            try:
                queue.close(max(0.0, deadline - time.monotonic()))
            except LoggerError as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]
