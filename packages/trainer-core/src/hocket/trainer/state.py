"""`State`: everything about a run that algorithms, callbacks and loggers may read and change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.data.batch_access import get_item, set_item
from hocket.trainer.errors import TimeUnitError
from hocket.trainer.interval import share_done
from hocket.trainer.optim import Scheduler, apply_schedulers
from hocket.trainer.protocols import Parallelism, TrainStep
from hocket.trainer.ranks.stop_signal import StopSignal
from hocket.trainer.time import Time, TimeUnit
from hocket.trainer.timestamp import Counts, Timestamp, index_of, timestamp_of

T = TypeVar("T")


class WatchedList(list[T], Generic[T]):
    """A list that calls `on_change` after every change, so that events are prepared anew."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        super().__init__(items)
        self.on_change: Callable[[], None] = _nothing


def _nothing() -> None:
    """Do nothing: the callback of a list that is not watched."""


def _watched(name: str) -> Callable[..., Any]:
    change = getattr(list, name)

    def method(self: WatchedList[Any], *args: Any, **options: Any) -> Any:
        result = change(self, *args, **options)
        self.on_change()
        # For `+=` and `*=`, `result` is this list itself.
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
    """The parts and the progress of a run, in plain attributes; an assignment takes effect in the loop.

    Attributes:
        model: The user's model.
        module: The module that the loop calls: the model as the parallelism laid it out (often the same
            object).
        optimizers: The optimizers, which all step at the end of each batch.
        schedulers: Callables `(state, ssr) -> multiplier` of the learning rates, and torch's schedulers.
        scale_schedule_ratio: The factor by which schedules are stretched.
        step_schedulers_every_batch: Whether schedules advance with each batch, or with each epoch; None for
            batches, but epochs for torch's schedulers.
        dataloader: The loader of the current batches.
        dataloader_len: Number of batches in an epoch, if known.
        batch: The batch on the device; between `BEFORE_FORWARD` and `AFTER_BACKWARD`, the microbatch.
        outputs: The model's outputs for the last microbatch, kept until the next forward pass; freed after
            the loss if no callback, algorithm, logger, metric or train step may read them.
        loss: Within a microbatch, the return value of `model.loss`, with gradients; afterwards, the mean loss
            of this rank's batch, a tensor on the device. Reading its value waits for the device.
        counts: The progress of training in plain numbers; advanced before `BATCH_END`.
        previous_counts: The counts before the last advance.
        max_duration: The time at which `fit` ends. If a callback sets a time that has passed, a run that
            saves checkpoints first trains on the batch that was fetched ahead, as after `stop_training`.
        iteration_length: Epochs or tokens in an iteration; None for one endless iteration.
        run_name: The run's name, the same on every rank.
        seed: The seed, the same on every rank; rank r's generators start from `seed + r`.
        device: The device of this rank.
        precision: `"fp32"`, `"amp_bf16"`, `"amp_fp16"` or `"amp_fp8"`.
        device_train_microbatch_size: Number of samples in a microbatch; None for a rank's whole batch.
        metric_values: The last value of each metric, by its name in the log: `metrics/<label>/<Name>`.
        parallelism: The distribution of the model and its gradients over processes.
        train_step: The step that computes the gradients of a batch and updates the model; may be wrapped or
            replaced from `INIT` on.
        stop: The signal that ends training before its duration.
        profiler: The profiler of the run, which sets this attribute; else None.
        evaluation_depth: Number of evaluations and predictions in progress, each within the one before; 0
            while the model trains. What the outermost one began lasts until its end.
    """

    train_step: TrainStep

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: list[Optimizer],
        schedulers: list[Scheduler | LRScheduler],
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
        self.scale_schedule_ratio = 1.0
        self.step_schedulers_every_batch: bool | None = None
        self._callbacks: WatchedList[Any] = WatchedList(callbacks)
        self._algorithms: WatchedList[Any] = WatchedList(algorithms)
        self.parallelism = parallelism
        self.device = device
        self.precision = precision
        self.device_train_microbatch_size = device_train_microbatch_size
        self.max_duration = max_duration
        self.iteration_length: Time | None = None
        self.run_name = run_name
        self.seed = seed
        self.train_dataloader: Any = None
        self.evaluators: list[Any] = []
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self.metric_values: dict[str, Any] = {}
        self.eval_timestamp = Timestamp()
        self.predict_timestamp = Timestamp()
        self.dataloader: Any = None
        self.dataloader_label: str | None = None
        self.dataloader_len: int | None = None
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.counts = self.previous_counts = Counts()
        self.stop = StopSignal()
        self._known_duration: Time | None = None
        self._end: tuple[int, float] = (0, math.inf)
        self.profiler: Any = None
        self.evaluation_depth = 0
        self.training_rng: Callable[[Any], dict[str, Any]] | None = None
        """While an evaluation or prediction runs, a function that returns the generators of the training."""
        self.stops_at_once = True
        """Whether a stop takes effect while batches are ahead, as in one process without checkpoints."""

    def __repr__(self) -> str:
        counts, end = self.counts, "" if self.max_duration is None else f" of {self.max_duration}"
        return (
            f"<State of {type(self.model).__name__}: at batch {counts.batch} (epoch {counts.epoch}){end}, "
            f"{self.device}, {self.precision}, rank {self.parallelism.global_rank} of "
            f"{self.parallelism.world_size}>"
        )

    @property
    def callbacks(self) -> WatchedList[Any]:
        """The callbacks; an assignment replaces the items of this one list."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Any]) -> None:
        self._callbacks[:] = list(callbacks)

    @property
    def algorithms(self) -> WatchedList[Any]:
        """The training methods; an assignment replaces the items of this one list."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, algorithms: Iterable[Any]) -> None:
        self._algorithms[:] = list(algorithms)

    def stop_training(self, reason: str = "`stop_training` was called") -> None:
        """End the training after the present batch, its events and its checkpoint, or soon after.

        In a run that saves checkpoints, batches that were fetched ahead are trained on first, because a
        checkpoint cannot restore them; with the default prefetch that is one batch. On several ranks, the
        exchange of the next batch carries the request, so that all ranks end after the same batch.

        Args:
            reason: The reason, for the run's log.
        """
        self.stop.request(reason)
        if self.parallelism.world_size == 1:
            self.stop.agree()
            if self.stops_at_once:
                self.stop.finalize()

    def give_notice(self, grace_s: float | None = None) -> None:
        """End the run as SIGTERM would, for an engine that announces its end in another way.

        All ranks save and stop after the same batch, and `fit` raises `SystemExit` with 143. One rank's
        notice is enough, in any of its threads; later ones are ignored. Outside a fit it has no effect.

        Args:
            grace_s: Seconds until this process is killed; a save that cannot end by then is not begun. None
                if they are not known.
        """
        if self.stop.notify is not None:
            self.stop.notify(grace_s)

    def get_elapsed_duration(self) -> Time | None:
        """Return the share of the training that is done, in `dur`; None without a `max_duration`."""
        if self.max_duration is None:
            return None
        try:
            return Time(share_done(self, self.counts), TimeUnit.DURATION)
        except TimeUnitError:  # epochs of unknown length: count whole epochs
            return self.timestamp.get(self.max_duration.unit) / self.max_duration

    def batch_get_item(self, key: Any) -> Any:
        """Return an item of `batch`.

        Args:
            key: An index, a key or attribute name, a list of them, a function of the batch, or a pair
                (getter, setter).
        """
        return get_item(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Set an item of `batch`; a tuple is replaced by a new one."""
        self.batch = set_item(self.batch, key, value)

    @property
    def timestamp(self) -> Timestamp:
        """The progress of training with units, built from `counts` on each read."""
        return timestamp_of(self.counts)

    @timestamp.setter
    def timestamp(self, timestamp: Timestamp) -> None:
        self.counts = timestamp.counts

    @property
    def previous_timestamp(self) -> Timestamp:
        """The timestamp before the last batch, epoch or iteration that ended."""
        return timestamp_of(self.previous_counts)

    @previous_timestamp.setter
    def previous_timestamp(self, timestamp: Timestamp) -> None:
        self.previous_counts = timestamp.counts

    def set_rates(self) -> None:
        """Set the learning rates of the batch that starts, by `schedulers`; called before each batch."""
        apply_schedulers(self)

    def advance(self, counts: Counts) -> None:
        """Set `counts`, and keep the present ones as `previous_counts`."""
        self.previous_counts, self.counts = self.counts, counts

    def is_over(self, counts: Counts | None = None) -> bool:
        """Return whether training was stopped, or `max_duration` is reached, now or at `counts`."""
        # A step calls this twice, so the end is looked up only when the duration changes.
        index, value = self._end if self.max_duration is self._known_duration else self.end()
        return self.stop.is_final or (self.counts if counts is None else counts)[index] >= value

    def end(self) -> tuple[int, float]:
        """Return the index in `counts` that `max_duration` limits, and the count at the end of training."""
        self._known_duration = duration = self.max_duration
        self._end = (0, math.inf) if duration is None else (index_of(duration.unit), duration.value)
        return self._end

    def is_iteration_over(self) -> bool:
        """Return whether the iteration has as many epochs or tokens as `iteration_length`."""
        length = self.iteration_length
        if length is None:
            return False
        counts = self.counts
        done = counts.epoch_in_iteration if length.unit.value == "ep" else counts.token_in_iteration
        return done >= length.value
