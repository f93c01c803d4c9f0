"""Trial runs of a training script: few batches, repeated batches, or an evaluation before training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.utils.data as torch_data

from hocket.trainer.callback import Callback
from hocket.trainer.checks import as_list
from hocket.trainer.data.sampling import with_sampler
from hocket.trainer.errors import DataError
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.notices import print_notices
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.setup.settings import LoopSettings
from hocket.trainer.time import Time

if TYPE_CHECKING:
    from hocket.trainer.state import State


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The limits of a trial run."""

    loop: LoopSettings

    @property
    def num_batches(self) -> int | None:
        """The number of batches in training and in each evaluation of a `fast_dev_run`; None for no limit."""
        return int(self.loop.fast_dev_run) or None

    def train_on(self, loader: Any) -> Any:
        """Return the loader to train on in place of `loader`, which is this rank's own."""
        return RepeatedBatches(loader, self._num_of(loader)) if self.loop.overfit_batches else loader

    def most_eval_batches(self, loader: Any) -> int | None:
        """Return the most batches of a loader to evaluate on; None for no limit."""
        limits = [self.num_batches, self._num_of(loader) if self.loop.overfit_batches else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _num_of(self, loader: Any) -> int:
        given = self.loop.overfit_batches
        if isinstance(given, int):
            return given
        try:
            return max(1, int(len(loader) * given))
        except TypeError as error:
            raise DataError(
                f"`overfit_batches` is the share {given}, and `{type(loader).__name__}` has no length; state "
                "a whole number of batches"
            ) from error


def with_trial_run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer`; for a `fast_dev_run`, limited and without saves and loggers."""
    trial = TrialRun(arguments["loop"])
    changed = dict(arguments)
    if (num := trial.num_batches) is None:
        return changed
    subset = arguments["train_subset_num_batches"]
    callbacks = [one for one in as_list(arguments["callbacks"]) if not isinstance(one, LoggerDestination)]
    return changed | {
        "train_subset_num_batches": num if subset == -1 else min(num, subset),
        "callbacks": [*callbacks, FastDevRun(num)],
        "loggers": None,
        "save_folder": None,
        "autoresume": False,
    }


class FastDevRun(Callback):
    """A callback that ends each fit after its first epoch, which `train_subset_num_batches` limits.

    `max_duration` is not shortened, so that the schedules are those of the whole run.

    Args:
        num_batches: Number of batches in an epoch, for the notice.
    """

    reads_outputs = False

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def fit_start(self, state: State, logger: Logger) -> None:
        """Print a notice of the limits."""
        notice = (
            f"`fast_dev_run`: at most {Time.from_batch(self.num_batches).describe()} of training and of each "
            "evaluation; nothing is saved, and loggers are left out"
        )
        print_notices(state, [notice])

    def epoch_end(self, state: State, logger: Logger) -> None:
        """End the fit. Every rank does so after the same epoch, so no exchange is needed."""
        state.stop.request("`fast_dev_run`")
        state.stop.agree()
        state.stop.finalize()


class RepeatedBatches:
    """The first batches of a loader, kept in memory and yielded again in each epoch.

    Each epoch gets copies, so that a step may change its batch in place.

    Args:
        loader: This rank's loader.
        num_batches: Number of batches to keep.
    """

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_batches = num_batches
        self._loader = loader
        self._kept: list[tuple[Any, Any]] | None = None
        self._present: Any = None
        if hasattr(loader, "data_parallel"):
            self.data_parallel = loader.data_parallel
        if hasattr(loader, "batch_share"):
            self.batch_share = self._share

    def __len__(self) -> int:
        return min(self.num_batches, len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        if self._kept is None:
            share = getattr(self._loader, "batch_share", lambda: None)
            batches = []
            for batch in self._loader:
                batches.append((batch, share()))
                if len(batches) == self.num_batches:
                    break
            self._kept = batches
        for batch, share in self._kept:
            self._present = share
            yield copy.deepcopy(batch)

    def _share(self) -> Any:
        """Return the share of the batch that was yielded last, as the loader stated it."""
        return self._present


def in_order(loader: Any) -> Any:
    """Return an unshuffled copy of a plain `DataLoader` that shuffles; any other loader unchanged."""
    if isinstance(loader, torch_data.DataLoader) and type(loader.sampler) is torch_data.RandomSampler:
        return with_sampler(loader, torch_data.SequentialSampler(loader.dataset))  # type: ignore[arg-type]
    return loader
