"""`GlobalBatchLoader`: the same global batches of a data set, whatever the number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data as torch_data

from hocket.trainer.data.worker_seeds import SeededMessage, end_workers
from hocket.trainer.errors import DataError, TimeUnitError, TrainerConfigError
from hocket.trainer.optim.batch_size import BatchSizeWarmupScheduler
from hocket.trainer.process.rng import derived_seed
from hocket.trainer.time import Time, TimeUnit
from hocket.trainer.timestamp import Timestamp

BatchSize = int | BatchSizeWarmupScheduler
_UNITS = (TimeUnit.SAMPLE, TimeUnit.BATCH, TimeUnit.DURATION)


@dataclass(slots=True)
class _ScheduleProgress:
    """The progress that a schedule of batch sizes reads."""

    timestamp: Timestamp
    max_duration: Time | None
    dataloader_len: int | None = None


class GlobalBatchLoader:
    """A loader that cuts each epoch of a data set into global batches and yields this rank's shares.

    The order of the samples is that of the loader's sampler, sequential or shuffled, drawn from the trainer's
    seed and the epoch. Order and batches do not depend on the number of ranks, so that a run resumes exactly
    on another number of ranks. The position counts samples, so that a run may resume with another size. Every
    rank takes part in each step: a rank without a share of a short batch gets one sample with weight 0.

    Worker processes seed the generators of Python, NumPy and torch for each batch, from the seed, the epoch,
    the position and the rank, so that a resumed run draws the same numbers in them.

    Args:
        loader: A loader over a sized data set, with torch's own sampler; its workers, `collate_fn` and
            `drop_last` are used, its `batch_size` is not.
        size: Samples of a global batch; or a `BatchSizeWarmupScheduler`, which lets it grow.
        data_parallel: The rank served, and the number of ranks.
        seed: The seed of the shuffle.
        max_duration: Returns the length of the training, for a schedule in `dur`.

    Attributes:
        on_epoch: Called with the number of batches when an epoch begins.

    Raises:
        DataError: If the loader's samples cannot be divided.
        TrainerConfigError: If the schedule's time cannot be known ahead of the training.
    """

    def __init__(
        self,
        loader: Any,
        size: BatchSize,
        data_parallel: tuple[int, int],
        *,
        seed: int,
        max_duration: Callable[[], Time | None] = lambda: None,
    ) -> None:
        shuffle = _is_shuffled(loader)
        if isinstance(size, BatchSizeWarmupScheduler) and size.t_warmup.unit not in _UNITS:
            raise TrainerConfigError(
                f"`t_warmup` of the batch size is `{size.t_warmup}`; a data loader needs to know the sizes "
                "ahead, so state it in `sp`, `ba` or `dur`"
            )
        self.data_parallel = data_parallel
        self.dataset = loader.dataset
        self.seed = seed
        self.shuffle = shuffle
        self.on_epoch: Callable[[int], object] = _nothing
        self._size = size
        self._drop_last = bool(loader.drop_last)
        self._max_duration = max_duration
        self._epoch = self._samples_before = self._batches_before = 0
        self._batch = self._sample = 0
        """Numbers of the batches and of the samples of the epoch that were yielded."""
        self._is_begun = False
        self._share = (0, 0)
        self._sampler = _ShareSampler()
        self._inner: Any = copy.copy(loader)
        # `DataLoader` refuses to set these after its construction.
        self._inner.__dict__.update(batch_sampler=self._sampler, sampler=self._sampler, _iterator=None)

    @property
    def batch_size(self) -> int | None:
        """Number of this rank's samples in a batch; None if it differs between batches or ranks."""
        num_ranks = self.data_parallel[1]
        if not isinstance(self._size, int) or self._size % num_ranks:
            return None
        return self._size // num_ranks

    @property
    def collate_fn(self) -> Any:
        """The function of the loader that makes a batch of samples."""
        return self._inner.collate_fn

    @property
    def shuffle_seed(self) -> int:
        """The seed of the order."""
        return self.seed

    def __len__(self) -> int:
        """Return the number of global batches of the epoch that is in progress or comes next."""
        return self._batch + len(self._cuts())

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:  # an epoch that was not read to its end
            self._next_epoch()
        self._is_begun = True
        cuts, order = self._cuts(), self._order()
        rank, num_ranks = self.data_parallel
        has_workers = self._inner.num_workers > 0
        shares = []
        rows: list[Any] = []
        for start, stop in cuts:
            num = stop - start
            own_rows = order[start + rank * num // num_ranks : start + (rank + 1) * num // num_ranks]
            shares.append((len(own_rows), num))
            batch_rows = own_rows or order[start : start + 1]
            seed = derived_seed(self.seed, self._epoch, start, rank) if has_workers else 0
            rows.append(SeededMessage(seed, batch_rows) if has_workers else batch_rows)
        self.on_epoch(self._batch + len(cuts))
        self._sampler.rows = rows
        # torch's loader draws the seed of its workers from this generator, the same after a resume.
        self._inner.generator = torch.Generator().manual_seed(derived_seed(self.seed, rank))
        for share, cut, batch in zip(shares, cuts, self._inner, strict=True):
            self._share = share
            self._batch += 1
            self._sample = cut[1]
            yield batch
        self._next_epoch()
        self._is_begun = False

    def batch_share(self) -> tuple[int, int]:
        """Return this rank's samples of the last batch, and those of all ranks."""
        return self._share

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is the same on every rank."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "sample": self._sample,
            "samples_before": self._samples_before,
            "batches_before": self._batches_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            DataError: If the position is beyond the end of the data set.
        """
        self._epoch, self._batch, self._sample = state["epoch"], state["batch"], state["sample"]
        if self._sample > len(self.dataset):
            raise DataError(
                f"the checkpoint is at sample {self._sample} of its epoch, and the data set has "
                f"{len(self.dataset)}; resume with the same data"
            )
        self._samples_before, self._batches_before = state["samples_before"], state["batches_before"]
        self._is_begun = False

    def end_epoch(self) -> None:
        """Move to the start of the next epoch, before all batches of this one were read."""
        self._next_epoch()
        self._is_begun = False

    def end_workers(self) -> None:
        """End persistent workers."""
        end_workers(self._inner)

    def _next_epoch(self) -> None:
        self._samples_before += self._sample
        self._batches_before += self._batch
        self._epoch += 1
        self._batch = self._sample = 0

    def _order(self) -> list[int]:
        num = len(self.dataset)
        if not self.shuffle:
            return list(range(num))
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        order: list[int] = torch.randperm(num, generator=generator, device="cpu").tolist()
        return order

    def _cuts(self) -> list[tuple[int, int]]:
        """Return the start and the stop, in the epoch's order, of each global batch that is left."""
        cuts, start, num = list[tuple[int, int]](), self._sample, len(self.dataset)
        while start < num:
            stop = start + self._size_at(start, self._batch + len(cuts))
            if stop > num and self._drop_last:
                break
            cuts.append((start, min(stop, num)))
            start = stop
        return cuts

    def _size_at(self, samples: int, batches: int) -> int:
        if isinstance(self._size, int):
            return self._size
        done = Timestamp(sample=self._samples_before + samples, batch=self._batches_before + batches)
        duration = self._max_duration()
        try:
            return self._size(_ScheduleProgress(done, duration))
        except TimeUnitError as error:
            raise TrainerConfigError(
                f"`t_warmup` of the batch size is `{self._size.t_warmup}`, and `max_duration` is "
                f"`{duration}`; state one of them in `sp`"
            ) from error


class _ShareSampler(torch_data.Sampler[list[int]]):
    """A sampler of lists of indices that are set in advance."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _nothing(num_batches: int) -> None:
    """Stand for a hook that is not set."""


def _is_shuffled(loader: Any) -> bool:
    """Return whether a plain loader shuffles.

    Raises:
        DataError: If it is no plain loader over a sized data set.
    """
    if not isinstance(loader, torch_data.DataLoader) or isinstance(
        loader.dataset, torch_data.IterableDataset
    ):
        raise DataError(
            "`global_train_batch_size` divides the samples of a `torch.utils.data.DataLoader` over a data "
            f"set with a length; `train_dataloader` is a `{type(loader).__name__}`"
            + (" over an `IterableDataset`" if isinstance(loader, torch_data.DataLoader) else "")
            + ", which makes its own batches: state their size there"
        )
    sampler: Any = loader.sampler
    is_random = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if type(loader.batch_sampler) is not torch_data.BatchSampler or not (
        is_random or type(sampler) is torch_data.SequentialSampler
    ):
        owner = loader.batch_sampler if type(sampler) is torch_data.SequentialSampler else sampler
        raise DataError(
            "`global_train_batch_size` needs torch's sequential or random sampler, and `train_dataloader` "
            f"has a `{type(owner).__name__}`; leave the sampler out, or `global_train_batch_size`"
        )
    return is_random
