"""`State` with Composer's arguments, for scripts that make one by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hocket.compat.composer.devices import as_torch_device
from hocket.compat.composer.optim.timed_schedule import (
    as_timed,
    is_stepped_every_batch,
    start_schedules,
    step_schedules,
)
from hocket.compat.composer.state_dicts import StateDicts
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.trainer import State as _State
from hocket.trainer import Time
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.evaluation.evaluator import as_evaluators
from hocket.trainer.ranks.single_process import SingleProcess
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time
from hocket.trainer.timestamp import Counts


class BatchCount(int):
    """A number of batches that is also read as Composer's `Time`."""

    @property
    def value(self) -> int:
        """The number."""
        return int(self)

    @property
    def unit(self) -> TimeUnit:
        """The unit of time, batches."""
        return TimeUnit.BATCH


class _Several:
    """An attribute that is a list; a single value may be assigned in place of a list of it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, state: Any, owner: type) -> Any:
        return getattr(state, self._name)

    def __set__(self, state: Any, value: Any) -> None:
        setattr(state, self._name, list(ensure_tuple(value)))


class _Schedules(_Several):
    """The schedules, each with the current learning rates."""

    def __set__(self, state: Any, value: Any) -> None:
        super().__set__(state, [as_timed(one, state) for one in ensure_tuple(value)])
        # Rates start at the time at which the schedules are given, or are those of a checkpoint.
        state._starts_at = getattr(getattr(state, "counts", None), "batch", 0)


class State(StateDicts, _State):
    """`hocket.trainer.State`, made with Composer's arguments; the class of the state in this layer's trainer.

    Args:
        model: The model.
        rank_zero_seed: The seed of rank 0.
        run_name: The name of the run.
        device: The device of this rank.
        max_duration: The duration of the training.
        device_train_microbatch_size: Samples in a microbatch of this rank.
        train_dataloader: The data loader of the training.
        evaluators: One or several evaluators or data loaders.
        dataloader: The active data loader; it needs a label.
        dataloader_label: Its label.
        dataloader_len: Its batches an epoch; -1 for all.
        precision: The precision of forward passes.
        optimizers: One or several.
        algorithms: One or several.
        callbacks: One or several.
        schedulers: One or several; given by the trainer.
        parallelism: The layout of the model over ranks; given by the trainer.
        seed: Another name of `rank_zero_seed`, given by the trainer.
        **others: Arguments of Composer's that have no effect here; they must have their defaults.

    Raises:
        TrainerConfigError: If an argument is unknown or has a value that would have no effect.
    """

    def __init__(
        self,
        model: nn.Module,
        rank_zero_seed: int = 0,
        run_name: str = "",
        device: Any = None,
        max_duration: TimeInput | None = None,
        device_train_microbatch_size: int | None = None,
        auto_microbatching: bool = False,
        train_dataloader: Iterable[Any] | None = None,
        evaluators: Any = None,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time = -1,
        *,
        precision: str = "fp32",
        optimizers: Any = None,
        algorithms: Any = None,
        callbacks: Any = None,
        schedulers: Any = None,
        parallelism: Any = None,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        _check_unused({"auto_microbatching": auto_microbatching or None, **others})
        torch_device = as_torch_device("cpu" if device is None else device)
        super().__init__(
            model=model,
            optimizers=list(ensure_tuple(optimizers)),
            schedulers=list(ensure_tuple(schedulers)),
            callbacks=ensure_tuple(callbacks),
            algorithms=ensure_tuple(algorithms),
            parallelism=parallelism or SingleProcess(torch_device),
            device=torch_device,
            precision=str(precision),
            device_train_microbatch_size=device_train_microbatch_size,
            max_duration=None if max_duration is None else ensure_time(max_duration, TimeUnit.EPOCH),
            run_name=run_name,
            seed=rank_zero_seed if seed is None else seed,
        )
        self.train_dataloader = train_dataloader
        self.evaluators = as_evaluators(evaluators)
        if dataloader is not None:
            self.set_dataloader(dataloader, dataloader_label, dataloader_len)

    optimizers: Any = _Several()
    schedulers: Any = _Schedules()
    _starts_at: int | None = None

    def set_rates(self) -> None:
        """Set the rates at which schedules start; `advance` sets all others, as Composer does."""
        starts_at, self._starts_at = self._starts_at, None
        if starts_at == self.counts.batch:
            start_schedules(self)

    def advance(self, counts: Counts) -> None:
        """Advance the time, after a step of the schedulers, which still see the time before."""
        before = self.counts
        has_ended = counts.batch > before.batch, counts.epoch > before.epoch
        if any(has_ended) and self.schedulers and has_ended[not is_stepped_every_batch(self)]:
            step_schedules(self)
        super().advance(counts)

    evaluators: Any = _Several()

    @property
    def callbacks(self) -> Any:
        """The callbacks; an assignment, of one or several, replaces the items of this list."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Any) -> None:
        self._callbacks[:] = list(ensure_tuple(callbacks))

    @property
    def algorithms(self) -> Any:
        """The training methods; an assignment, of one or several, replaces the items of this list."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, algorithms: Any) -> None:
        self._algorithms[:] = list(ensure_tuple(algorithms))

    @property
    def dataloader_len(self) -> BatchCount | None:
        """The batches of an epoch, if they are known; an integer that has `value` and `unit`."""
        return self._dataloader_len

    @dataloader_len.setter
    def dataloader_len(self, length: int | Time | None) -> None:
        self._dataloader_len = None if length is None else BatchCount(int(length))

    @property
    def max_duration(self) -> Time | None:
        """The duration of the training; a string or a number of epochs may be assigned."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, duration: TimeInput | None) -> None:
        self._max_duration = None if duration is None else ensure_time(duration, TimeUnit.EPOCH)

    def set_dataloader(
        self,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time = -1,
    ) -> None:
        """Set the active data loader with its label and length.

        Args:
            dataloader: The loader; None for none.
            dataloader_label: Its label.
            dataloader_len: Its batches an epoch; -1 for all of them.

        Raises:
            TrainerConfigError: If a loader has no label.
        """
        if dataloader is not None and dataloader_label is None:
            raise TrainerConfigError("`dataloader` is given without `dataloader_label`; name it, as `train`")
        self.dataloader = dataloader
        self.dataloader_label = None if dataloader is None else dataloader_label
        length: int | None = len(dataloader) if isinstance(dataloader, Sized) else None
        asked = int(dataloader_len)
        if length is not None and asked > length:
            warnings.warn(
                f"`dataloader_len` is {asked}, and the data loader has {length} batches; {length} is used",
                stacklevel=2,
            )
        self.dataloader_len = length if asked < 0 or (length is not None and asked > length) else asked

    @property
    def rank_zero_seed(self) -> int:
        """The seed of rank 0."""
        return self.seed

    @property
    def scaler(self) -> None:
        """None, in fp16 too: gradients are unscaled before `AFTER_TRAIN_BATCH`, where they may be changed."""
        return None

    @property
    def is_model_ddp(self) -> bool:
        """Whether the model's gradients are averaged by torch's DDP."""
        return isinstance(self.module, DistributedDataParallel)

    @property
    def fsdp_enabled(self) -> bool:
        """Whether a part of the model is sharded."""
        return any(isinstance(module, FSDPModule) for module in self.model.modules())


_UNUSED = frozenset(
    {
        "dataset_state",
        "dataset_resumption",
        "precision_config",
        "scaler",
        "save_metrics",
        "parallelism_config",
    }
)


def _check_unused(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name != "auto_microbatching" and name not in _UNUSED:
            raise TrainerConfigError(f"`State` has no argument `{name}`")
        if value is not None and value is not False:
            raise TrainerConfigError(
                f"`{name}` of a `State` made by hand has no effect; pass it to `Trainer`, or leave it out"
            )


__all__ = ["State"]
