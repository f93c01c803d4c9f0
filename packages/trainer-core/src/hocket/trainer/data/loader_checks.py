"""Checks that the data loader yields batches, and gives this rank its own share of the data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

import torch
import torch.utils.data as torch_data

from hocket.trainer.checks import refuse_class
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.time import Time, TimeUnit

LOADER_OF = (
    "pass a loader of it, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`, or with "
    "`batch_size=None` if its items are batches"
)
"""The remedy for a data set in place of a loader."""
_TARGETS = ("label", "labels", "target", "targets", "y")


def check_yields_batches(loader: Any) -> None:
    """Refuse what is no data loader: a class, a data set whose items would be taken for batches, or data.

    Raises:
        TrainerConfigError: If it is no loader.
    """
    refuse_class("dataloader", loader)
    name, is_iterable = type(loader).__name__, isinstance(loader, Iterable)
    # A map-style data set of torch or of a user; a data set of Hugging Face; one of Hocket.
    is_map = hasattr(loader, "__getitem__") and not is_iterable
    is_table = hasattr(loader, "column_names") and hasattr(loader, "set_format")
    items = loader if isinstance(loader, (list, tuple)) else ()
    if is_map or is_table or getattr(loader, "yields_samples", False) or any(map(is_sample, items[:1])):
        raise TrainerConfigError(
            f"the data loader is a `{name}`, which has samples and no batches; {LOADER_OF}"
        )
    if not is_iterable or isinstance(loader, (str, bytes, os.PathLike)) or hasattr(loader, "ndim"):
        raise TrainerConfigError(
            f"the data loader is a `{name}`; expected an iterable of batches, such as a "
            "`torch.utils.data.DataLoader`"
        )
    if items and isinstance(items[0], (torch_data.DataLoader, torch_data.Dataset)):
        raise TrainerConfigError(
            f"the data loader is a `{name}` of `{type(items[0]).__name__}`s; pass one loader. To evaluate on "
            "several, wrap each as `Evaluator(label=…, dataloader=…)`"
        )


def is_sample(item: Any) -> bool:
    """Return whether an item is a sample of a data set, by its target, the last part, that has no rows.

    Other numbers and texts may belong to all samples of a batch.
    """
    if isinstance(item, Mapping):
        targets = [part for name, part in item.items() if name in _TARGETS]
    else:
        targets = list(item[-1:]) if isinstance(item, (list, tuple)) and len(item) > 1 else []
    return any(
        isinstance(part, (Number, str)) or (isinstance(part, torch.Tensor) and not part.ndim)
        for part in targets
    )


def check_loader(loader: Any, data_parallel: tuple[int, int]) -> str:
    """Check that the loader serves the ranks that train, and describe the source of its division.

    Args:
        loader: The data loader.
        data_parallel: The rank and the number of ranks of the parallelism.

    Raises:
        DataError: If the loader serves other ranks.
    """
    rank, size = data_parallel
    served, source = _served(loader)
    if served is not None and tuple(served) != (rank, size):
        raise DataError(
            f"the data loader is for rank {served[0]} of {served[1]} ({source}), and the model trains as "
            f"data-parallel rank {rank} of {size}; give the data set the rank and the number of ranks of the "
            f"parallelism, or its `replication`{_replication(served[1], size)}"
        )
    if served is not None:
        return f"rank {served[0]} of {served[1]}, by {source}"
    return "one process takes all of it" if size == 1 else "the loader's own division"


def check_ends(loader: Any, duration: Time | None) -> None:
    """Refuse a duration in epochs where an epoch never ends.

    Raises:
        DataError: If the loader repeats for ever.
    """
    if duration is None or duration.unit not in (TimeUnit.EPOCH, TimeUnit.ITERATION):
        return
    if isinstance(loader, (itertools.cycle, itertools.count, itertools.repeat)) or getattr(
        loader, "is_infinite", False
    ):
        raise DataError(
            f"the duration is `{duration}`, and `{type(loader).__name__}` never ends, so no "
            "epoch does; state the duration in `ba`, `sp` or `tok`, or set `train_subset_num_batches`"
        )


def _replication(num_served: int, size: int) -> str:
    """Return the number of ranks that share their data, where it tells the difference."""
    return f", which is {num_served // size} here" if num_served > size and num_served % size == 0 else ""


def served_ranks(loader: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a loader states it serves; None if it states none."""
    return _served(loader)[0]


def _served(loader: Any) -> tuple[tuple[int, int] | None, str]:
    for part, name in (
        (loader, "the loader's `data_parallel`"),
        (getattr(loader, "dataset", None), "the data set's `data_parallel`"),
    ):
        if (served := getattr(part, "data_parallel", None)) is not None:
            return served, name
    for name in ("sampler", "batch_sampler"):
        sampler: Any = getattr(loader, name, None)
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return (sampler.rank, sampler.num_replicas), f"its `{type(sampler).__name__}`"
    return None, ""


def describe_order(loader: Any) -> str:
    """Describe the order of the samples."""
    data = getattr(loader, "dataset", None)
    shuffle = getattr(data, "shuffle", None)
    if isinstance(shuffle, bool):
        return f"shuffled from seed {getattr(data, 'shuffle_seed', '?')}" if shuffle else "as stored"
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch_data.SequentialSampler):
        return "as stored"
    if isinstance(sampler, torch_data.RandomSampler):
        return "shuffled anew each epoch by torch's generator"
    if isinstance(sampler, torch_data.DistributedSampler):
        return "shuffled anew each epoch by the sampler's seed" if sampler.shuffle else "as stored"
    return f"by `{type(sampler or loader).__name__}`"


def describe_split(
    loader: Any, data_parallel: tuple[int, int], microbatch_size: int | None, *, is_searched: bool = False
) -> str:
    """Describe the division of a global batch over ranks and microbatches."""
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        size = getattr(getattr(loader, "dataset", None), "batch_size", None)
    num_ranks = data_parallel[1]
    if not isinstance(size, int):
        split = "as the loader yields it"
    elif num_ranks == 1:
        split = f"{size} samples"
    else:
        split = f"{size * num_ranks} samples = {num_ranks} ranks × {size}"
    if microbatch_size is None:
        return f"{split}, in microbatches that are measured before the first step" if is_searched else split
    return f"{split}, in microbatches of {microbatch_size}"


def known_batch_size(loader: Any, functions: Iterable[Any] = ()) -> int | None:
    """Return the samples of each full batch of this rank; None where they are not known without a batch.

    Args:
        loader: The data loader.
        functions: Functions of the user that change, count or split batches, after which a batch may have
            another number of samples; None for no function.
    """
    size = getattr(loader, "batch_size", None)
    is_changed = any(one is not None for one in functions)
    if not isinstance(size, int) or is_changed or not _takes_what_its_sampler_gives(loader):
        return None
    if loader.collate_fn is not torch_data.default_collate:
        return None
    try:
        if isinstance(loader, GlobalBatchLoader):
            is_short = len(loader.dataset) < size * loader.data_parallel[1]
        else:
            is_short = len(loader.sampler) < size
    except TypeError:  # a stream, whose length is not known
        is_short = False
    return None if is_short else size


def _takes_what_its_sampler_gives(loader: Any) -> bool:
    """Return whether a loader is torch's or of global batches, and no class that changes what it yields."""
    if isinstance(loader, GlobalBatchLoader):
        return True
    return isinstance(loader, torch_data.DataLoader) and (
        type(loader).__iter__ is torch_data.DataLoader.__iter__
    )


def loader_length(loader: Any) -> int | None:
    """Return the length of a loader; None without one, as for a `DataLoader` over an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return None
