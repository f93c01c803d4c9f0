"""The position in an epoch of a data loader that keeps no state, counted in samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.utils.data as torch_data

from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.data.loader_checks import loader_length
from hocket.trainer.data.sampling import AutoSampler, with_sampler
from hocket.trainer.errors import ResumeError
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.timestamp import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """A position in an epoch, as a checkpoint stores it for each rank."""

    batch_size: int | None
    """The size of this rank's batches that the loader states; None if it states none."""
    samples: int | None
    """Number of the sampler's indices in this rank's batches; None if they cannot be computed."""
    all_samples: int
    """Number of samples of all ranks, as the loaders yielded them."""
    num_ranks: int
    is_global: bool
    """Whether the order is that of `global_train_batch_size`."""
    is_in_order: bool
    """Whether the order is that of the data set."""

    @classmethod
    def of(
        cls, loader: Any, *, num_batches: int, since: tuple[int, int], all_samples: int, num_ranks: int
    ) -> LoaderPosition:
        """Return the position after `num_batches` of an epoch.

        Args:
            loader: The loader.
            num_batches: Number of batches of the epoch.
            since: Number of batches and samples of the epoch before the loader got its batch size.
            all_samples: Number of samples of all ranks.
            num_ranks: Number of ranks.
        """
        size = _batch_size(loader)
        samples = None if size is None else _end_of(loader, since[1] + (num_batches - since[0]) * size)
        return cls(
            batch_size=_stated_size(loader),
            samples=samples,
            all_samples=all_samples,
            num_ranks=num_ranks,
            is_global=isinstance(loader, GlobalBatchLoader),
            is_in_order=_is_in_order(loader),
        )

    def check_state(self, loader: Any) -> None:
        """Check that a loader with a state of its own has the batch size of before.

        A loader with the attribute `data_parallel` plans for the whole job and checks its state itself.

        Raises:
            ResumeError: If the batch size differs, because the state may count batches.
        """
        size = _stated_size(loader)
        if hasattr(loader, "data_parallel") or None in (size, self.batch_size) or size == self.batch_size:
            return
        raise ResumeError(
            f"`{type(loader).__name__}` made batches of {self.batch_size} samples when its state was saved, "
            f"and its `batch_size` is {size} now, with which the state may stand for other samples; resume "
            f"with `batch_size={self.batch_size}` until the epoch has ended"
        )

    def _check_order(self, loader: Any) -> None:
        """Check that the samples of before are the first ones of the loader's order.

        Raises:
            ResumeError: If one of the two orders is that of `global_train_batch_size`, and they differ.
        """
        is_global = isinstance(loader, GlobalBatchLoader)
        if is_global == self.is_global or (self.is_in_order and _is_in_order(loader)):
            return
        given, other = ("with", "without") if self.is_global else ("without", "with")
        raise ResumeError(
            f"the checkpoint was saved within an epoch {given} `global_train_batch_size`, and this run is "
            f"{other} it, so its order is another one; train to the end of the epoch {given} it, or set "
            "`spin_dataloaders=False`, which starts the epoch's data anew"
        )

    def first_sample(self, loader: Any, *, num_batches: int, num_ranks: int) -> int | None:
        """Return the number of the sampler's index at which this rank continues.

        Returns:
            None if the samples of before are the loader's first `num_batches` batches, or if their number is
            not known; the batches are then fetched again.

        Raises:
            ResumeError: If the samples of before do not divide over the ranks, or the loader's order is
                another one.
        """
        self._check_order(loader)
        size = _batch_size(loader)
        if size is None or (self.samples is None and not self.is_global):
            return None
        if self.samples is not None and self.num_ranks == num_ranks:
            samples = self.samples
        else:
            everything = self.all_samples if self.samples is None else self.samples * self.num_ranks
            samples, rest = divmod(everything, num_ranks)
            if rest and _end_of(loader, samples) == samples:
                raise ResumeError(
                    f"{everything} samples of the epoch were trained on, which do not divide over "
                    f"{num_ranks} ranks; resume on a number of ranks that divides them, or set "
                    "`spin_dataloaders=False`, which starts the epoch's data anew"
                )
        samples = _end_of(loader, samples)
        is_same = samples == _end_of(loader, num_batches * size) and (num_batches - 1) * size < samples
        return None if is_same else samples

    def check_samples(self, loader: Any, *, num_batches: int, all_samples: int) -> None:
        """Check that the first batches of a loader had as many samples as those of before.

        Raises:
            ResumeError: If they had not.
        """
        if all_samples != self.all_samples:
            raise ResumeError(
                f"the {num_batches} batches of this epoch that were trained on had {self.all_samples} "
                f"samples, and the first {num_batches} batches of `{type(loader).__name__}` have "
                f"{all_samples} now; the trainer cannot divide its batches, so resume with the batch size of "
                "before until the epoch has ended, or set `spin_dataloaders=False`, which starts the epoch's "
                "data anew"
            )


class EpochProgress:
    """The samples of the present epoch that a loader has yielded for training.

    Args:
        loader: The loader.
        sync: The exchange between the ranks.
    """

    def __init__(self, loader: Any, sync: StepSync) -> None:
        self._loader = loader
        self._sync = sync
        self.reset()

    def reset(self) -> None:
        """Start counting at the start of an epoch."""
        self.num_recounted = 0
        """Samples that callbacks and algorithms have removed from the epoch's batches, over all ranks."""
        self._loaded: LoaderPosition | None = None
        # Batches and samples of the epoch before the loader got its present batch size.
        self._since = (0, 0)

    def position(self, counts: Counts) -> dict[str, Any]:
        """Return the position for a checkpoint; empty at the start of an epoch."""
        if not counts.batch_in_epoch:
            return {}
        position = LoaderPosition.of(
            self._loader,
            num_batches=counts.batch_in_epoch,
            since=self._since,
            all_samples=counts.sample_in_epoch + self.num_recounted,
            num_ranks=self._sync.num_data_ranks,
        )
        return asdict(position)

    def load(self, saved: Mapping[str, Any] | None, counts: Counts) -> None:
        """Take a saved position; None or an empty one for a checkpoint without one."""
        if saved:
            self._loaded = LoaderPosition(
                **{field.name: saved[field.name] for field in fields(LoaderPosition)}
            )
            self.num_recounted = self._loaded.all_samples - counts.sample_in_epoch

    def check_state(self) -> None:
        """Check that a loader with a state of its own has the batch size of before.

        Raises:
            ResumeError: If the batch size differs.
        """
        if self._loaded is not None:
            self._loaded.check_state(self._loader)

    def skip(self, num_batches: int, *, start: Callable[..., int]) -> tuple[int | None, int | None]:
        """Start the epoch after the samples that were trained on. Collective.

        Args:
            num_batches: Number of batches of the epoch that were trained on.
            start: A function that starts the epoch: `start(skip=…, counts=…)` or `start(skip=…, rest=…)`.

        Returns:
            The number of indices that this rank's sampler leaves out, and the number of batches of the epoch;
            None for both if the batches were fetched again.

        Raises:
            ResumeError: If the batches have other samples than before, and the loader cannot be divided.
        """
        loader, position, sync = self._loader, self._loaded, self._sync
        first, is_counted, num_samples, length = None, False, 0, 0
        if position is not None:
            first = position.first_sample(loader, num_batches=num_batches, num_ranks=sync.num_data_ranks)
        if first is None:
            is_counted = position is not None and _batch_size(loader) is None
            num_samples = start(skip=num_batches, counts=is_counted)
        else:
            indices = _RestOfSampler(loader.batch_sampler.sampler, first)
            rest = with_sampler(loader, indices)
            start(skip=num_batches, rest=rest)
            # The caller restores the generators afterwards, so the order is drawn now.
            indices.begin()
            self._since = num_batches, first
            length = num_batches + (loader_length(rest) or 0)
        all_samples, num_counting = sync.sum_of_data(num_samples, is_counted)
        if position is not None and num_counting == sync.num_data_ranks:
            position.check_samples(loader, num_batches=num_batches, all_samples=int(all_samples))
        return first, int(min(sync.gather(length))) or None


class _RestOfSampler(torch_data.Sampler[Any]):
    """The indices of a sampler from one on, for one iteration."""

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler = sampler
        self._first = first
        self._indices: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        """Return the indices; the first call draws the order and leaves out what was trained on."""
        if self._indices is None:
            self._indices = iter(self._sampler)
            for _ in range(self._first):
                next(self._indices)
        return self._indices

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._first)


def _batch_size(loader: Any) -> int | None:
    """Return the size of the batches of a loader that takes them from its sampler one after the other."""
    if not isinstance(loader, torch_data.DataLoader) or isinstance(
        loader.dataset, torch_data.IterableDataset
    ):
        return None
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is torch_data.BatchSampler else None


def _stated_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else _batch_size(loader)


def _end_of(loader: Any, samples: int) -> int:
    """Return the smaller number of `samples` and the indices of the loader's sampler."""
    try:
        return min(samples, len(loader.batch_sampler.sampler))
    except TypeError:
        return samples


def _is_in_order(loader: Any) -> bool:
    if isinstance(loader, GlobalBatchLoader):
        return not loader.shuffle
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return type(sampler) is torch_data.SequentialSampler or (
        isinstance(sampler, AutoSampler) and not sampler.shuffle
    )
