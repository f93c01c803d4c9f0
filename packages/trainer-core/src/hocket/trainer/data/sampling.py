"""The division of a plain `DataLoader`'s samples over the ranks."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch.utils.data as torch_data

from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.data.loader_checks import check_loader, served_ranks
from hocket.trainer.errors import DataError
from hocket.trainer.protocols import Collectives, FollowsRanks

_log = logging.getLogger(__name__)


class ShardedLoader(NamedTuple):
    """A loader of this rank's own batches."""

    spec: DataSpec
    source: str
    """A description of how the samples are divided, for the summary of the run."""
    notice: str | None
    """A sentence for the user on the division of the samples, or None."""
    is_unknown: bool = False
    """Whether nothing says that the ranks get different samples, so that they compare their first batches."""


def shard(spec: DataSpec, ranks: Collectives, *, seed: int, auto_shard: bool, argument: str) -> ShardedLoader:
    """Make sure that each rank trains on samples of its own.

    With several ranks, a `DataLoader` over indices with torch's sequential or random sampler is copied with a
    `DistributedSampler`, which shuffles from the trainer's seed. Every other argument is kept; `batch_size`
    then counts the samples of each rank. The caller's loader is not changed. A loader that already divides
    its samples, a loader over an iterable data set, and any other iterable are returned unchanged.

    Args:
        spec: The loader.
        ranks: The parallelism, which knows the data-parallel rank and the number of ranks.
        seed: The trainer's seed, the same on every rank.
        auto_shard: Whether a loader may be copied with another sampler.
        argument: The loader's name, for messages.

    Raises:
        DataError: If the loader serves other ranks, or its sampler gives every rank all samples and cannot be
            replaced.
    """
    loader: Any = spec.dataloader
    rank, size = ranks.data_parallel
    follow_ranks(loader, ranks)
    source = check_loader(loader, ranks.data_parallel)
    if spec.is_sharded:
        return ShardedLoader(spec, "the loader's own division, as the `DataSpec` states", None)
    if spec.is_replicated:
        return ShardedLoader(spec, "the same batches on every rank, as the `DataSpec` states", None)
    if size == 1 or served_ranks(loader) is not None:
        return ShardedLoader(spec, source, None)
    if not _has_indices(loader):
        return ShardedLoader(spec, source, None, is_unknown=True)
    if not auto_shard:
        return ShardedLoader(
            spec,
            "as the loader yields it",
            f"`auto_shard` is off: `{argument}` keeps its `{type(loader.sampler).__name__}` on all {size} "
            "ranks",
        )
    sampler = _sampler_of(loader)
    shuffle = type(sampler) is torch_data.RandomSampler
    is_plain = type(sampler) is torch_data.SequentialSampler or (
        shuffle and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    if not is_plain or type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        raise DataError(_refusal(loader, sampler, size, argument))
    distributed = AutoSampler(
        loader.dataset,
        num_replicas=size,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=bool(loader.drop_last),
    )
    notice = (
        f"`{argument}` got a `DistributedSampler` ({'shuffled' if shuffle else 'in order'}, seed {seed}), so "
        f"that each of {size} ranks has its own samples; `loop={{'auto_shard': False}}` or "
        "`DataSpec(is_sharded=True)` leaves a loader as it is"
    )
    _log.info("%s", notice)
    return ShardedLoader(
        replace(spec, dataloader=with_sampler(loader, distributed)),
        f"rank {rank} of {size}, by a `DistributedSampler` of the trainer",
        notice,
    )


def follow_ranks(loader: Any, ranks: Collectives) -> None:
    """Give a loader that serves one process of all its data-parallel rank, where processes share samples.

    A loader that serves other ranks than this process's among all was told them, and is left as it is.
    """
    served = served_ranks(loader)
    if served is None or tuple(served) != (ranks.global_rank, ranks.world_size):
        return
    for part in (loader, getattr(loader, "dataset", None)):
        if isinstance(part, FollowsRanks):
            part.follow_ranks(*ranks.data_parallel)
            return


class AutoSampler(torch_data.distributed.DistributedSampler[Any]):
    """The sampler that `shard` puts into a loader."""


class _JoinedSampler(torch_data.distributed.DistributedSampler[Any]):
    """The indices that the samplers of several ranks give together, in the order of their batches.

    Args:
        dataset: The data set.
        num_joined: The number of those ranks.
        shuffle: Whether the indices are shuffled.
        seed: The seed of the shuffle.
        drop_last: Whether the ranks leave out indices that do not divide over them, and do not repeat some.
    """

    def __init__(self, dataset: Any, num_joined: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        of_each: Any = torch_data.DistributedSampler(
            dataset, num_replicas=num_joined, rank=0, drop_last=drop_last
        )
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.total_size = self.num_samples = of_each.total_size


class _JoinedAutoSampler(_JoinedSampler, AutoSampler):
    """The same of `AutoSampler`s, which follow the trainer's seed."""


def joined_loader(loader: Any, num_joined: int, *, seed: int) -> Any | None:
    """Copy a loader so that each batch has the samples of all ranks of an earlier run; None if it cannot.

    Args:
        loader: A `DataLoader` over indices with torch's sequential or random sampler, which the trainer
            divides over ranks, or with a `DistributedSampler` of one rank.
        num_joined: The number of ranks of that run.
        seed: The trainer's seed of that run.
    """
    if not _has_indices(loader) or type(loader.batch_sampler) is not torch_data.BatchSampler:
        return None
    sampler, joined_type = loader.sampler, _JoinedSampler
    if type(sampler) is torch_data.DistributedSampler and sampler.num_replicas == 1:
        shuffle, seed, drop_last = sampler.shuffle, sampler.seed, sampler.drop_last
    elif type(sampler) in (torch_data.RandomSampler, torch_data.SequentialSampler):
        shuffle, drop_last = type(sampler) is torch_data.RandomSampler, bool(loader.drop_last)
        joined_type = _JoinedAutoSampler
    else:
        return None
    joined = with_sampler(
        loader, joined_type(loader.dataset, num_joined, shuffle=shuffle, seed=seed, drop_last=drop_last)
    )
    batches = joined.batch_sampler
    joined.__dict__["batch_sampler"] = torch_data.BatchSampler(
        batches.sampler, batches.batch_size * num_joined, batches.drop_last
    )
    return joined


def follow_seed(loader: Any, seed: int) -> None:
    """Set the shuffle seed of a loader that the trainer made, for example to the seed of a checkpoint."""
    if isinstance(loader, GlobalBatchLoader):
        loader.seed = seed
    elif isinstance(sampler := getattr(loader, "sampler", None), AutoSampler):
        sampler.seed = seed


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, torch_data.DataLoader) and not isinstance(
        loader.dataset, torch_data.IterableDataset
    )


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of the indices, which may be inside the loader's `batch_sampler`."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def with_sampler(loader: Any, sampler: torch_data.Sampler[Any]) -> Any:
    """Copy a loader with another sampler.

    The loader is copied and not constructed anew, so that a subclass keeps its constructor arguments.
    `DataLoader` refuses to set these attributes after its construction, so they are set in `__dict__`.
    """
    copied = copy.copy(loader)
    copied.__dict__["sampler"] = sampler
    if loader.batch_sampler is not None:
        batches = loader.batch_sampler
        copied.__dict__["batch_sampler"] = torch_data.BatchSampler(
            sampler, batches.batch_size, batches.drop_last
        )
    copied.__dict__["_iterator"] = None  # of persistent workers, which belong to the caller's loader
    return copied


def _refusal(loader: Any, sampler: Any, size: int, argument: str) -> str:
    is_batch_sampler = type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None))
    owner = type(loader.batch_sampler if is_batch_sampler else sampler).__name__
    return (
        f"`{argument}` has a `{owner}`, which gives the same samples to all {size} ranks, and the trainer "
        "cannot divide them without changing their order. Write `DataLoader(dataset, …, sampler="
        "torch.utils.data.DistributedSampler(dataset))`; or let the sampler take every "
        f"{size}th index from the rank on, and say so with `DataSpec(loader, is_sharded=True)`"
    )
