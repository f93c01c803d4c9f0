"""`State`: everything about a run that algorithms, callbacks and loggers may read and change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.trainer.optim import Scheduler
from hocket.trainer.protocols import Parallelism
from hocket.trainer.time import Time
from hocket.trainer.timestamp import Timestamp, count_in

T = TypeVar("T")


class WatchedList(list[T], Generic[T]):
    """A list that calls `on_change` after every change, so that events are prepared anew."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        super().__init__(items)
        self.on_change: Callable[[], None] = _nothing


def _nothing() -> None:
    """What a list calls that nobody watches yet."""


def _watched(name: str) -> Callable[..., Any]:
    change = getattr(list, name)

    def method(self: WatchedList[Any], *args: Any, **options: Any) -> Any:
        result = change(self, *args, **options)
        self.on_change()
        # `+=` and `*=` return the list itself; what `list` returns there is this very object.
        return result

    method.__name__ = name
    method.__doc__ = change.__doc__
    return method


for _name in (
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
    "__delitem__", "__iadd__", "__imul__", "__setitem__",
):  # fmt: skip
    setattr(WatchedList, _name, _watched(_name))


class State:
    """What a run is made of, and where it is. Plain attributes: what is set here, the loop uses.

    Attributes:
        model: The user's model.
        module: What the loop calls: the model as the parallelism laid it out (often the same object).
        optimizers: All of them step at the end of each batch.
        schedulers: Callables `(state, ssr) -> multiplier` of the learning rates.
        callbacks: A list; after a change, events are prepared anew.
        algorithms: As `callbacks`.
        dataloader: Where batches come from.
        dataloader_len: Batches an epoch, where known.
        batch: The batch on the device; between `BEFORE_FORWARD` and `AFTER_BACKWARD`, the microbatch.
        outputs: What the model returned for the microbatch; let go of after `AFTER_BACKWARD`.
        loss: Within a microbatch what `model.loss` returned, with gradients; after it the mean loss of this
            rank's batch, a tensor on the device, so that reading its number waits for the device.
        timestamp: How much has been trained on; advanced before `BATCH_END`.
        previous_timestamp: The one before that.
        max_duration: When `fit` ends.
        iteration_length: Epochs or tokens in an iteration; None for one endless iteration.
        run_name: The run's name, the same on every rank.
        seed: The seed, the same on every rank; rank r's generators start from `seed + r`.
        device: Where this rank computes.
        precision: `"fp32"`, `"amp_bf16"` or `"amp_fp16"`.
        device_train_microbatch_size: Samples a rank takes at once; None for its whole batch.
        parallelism: How model and gradients are spread.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: list[Optimizer],
        schedulers: list[Scheduler],
        callbacks: Iterable[Any],
        algorithms: Iterable[Any],
        parallelism: Parallelism,
        device: torch.device,
        precision: str,
        device_train_microbatch_size: int | None,
        max_duration: Time | None,
        run_name: str,
        seed: int,
    ) -> None:
        self.model = model
        self.module: nn.Module = model
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.callbacks: WatchedList[Any] = WatchedList(callbacks)
        self.algorithms: WatchedList[Any] = WatchedList(algorithms)
        self.parallelism = parallelism
        self.device = device
        self.precision = precision
        self.device_train_microbatch_size = device_train_microbatch_size
        self.max_duration = max_duration
        self.iteration_length: Time | None = None
        self.run_name = run_name
        self.seed = seed
        self.dataloader: Any = None
        self.dataloader_len: int | None = None
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.timestamp = Timestamp()
        self.previous_timestamp = self.timestamp
        self.is_stop_requested = False
        self.is_stopped = False

    def stop_training(self) -> None:
        """End the training after the present batch, its events and its checkpoint.

        In a job of several ranks the wish travels with the step's agreement, so that all of them end after
        the same batch: the next one at the latest.
        """
        self.is_stop_requested = True
        if self.parallelism.data_parallel[1] == 1:
            self.end_here()

    def end_here(self) -> None:
        """Make the present batch the last. Every rank must call it at the same batch."""
        self.is_stop_requested = False
        # Not by a shorter `max_duration`: schedules are functions of it, and the last batch has its own rate.
        self.is_stopped = True

    def advance(self, timestamp: Timestamp) -> None:
        """Set the time, and keep the one before."""
        self.previous_timestamp, self.timestamp = self.timestamp, timestamp

    def is_over(self, timestamp: Timestamp | None = None) -> bool:
        """Whether training was stopped, or `max_duration` is reached, now or at `timestamp`."""
        duration = self.max_duration
        if duration is None or self.is_stopped:
            return self.is_stopped
        counts = (timestamp or self.timestamp).counts
        return count_in(counts, duration.unit) >= duration.value

    def is_iteration_over(self) -> bool:
        """Whether the iteration has as many epochs or tokens as `iteration_length` asks for."""
        length = self.iteration_length
        if length is None:
            return False
        counts = self.timestamp.counts
        done = counts.epoch_in_iteration if length.unit.value == "ep" else counts.token_in_iteration
        return done >= length.value
