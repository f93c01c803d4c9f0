"""What an epoch takes of each stream, drawn as mosaicml-streaming draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError
from hocket.stream.weights import Weighted

Ids = NDArray[np.int64]


def resolve_shares(
    weights: Sequence[Weighted], sizes: Sequence[int], *, epoch_size: int | None
) -> NDArray[np.float64] | None:
    """Return which part of an epoch each stream is to have, or None where they give their numbers of samples.

    Args:
        weights: Of the streams.
        sizes: Their samples.
        epoch_size: Of all streams together.

    Raises:
        ConfigError: Some streams have a proportion and others none, all proportions are 0, or `epoch_size`
            stands beside `repeat` or `choose`.
    """
    shares = [weight.proportion for weight in weights]
    is_absolute = any(weight.repeat is not None or weight.choose is not None for weight in weights)
    if all(share is None for share in shares):
        if epoch_size is None:
            return None
        shares = [float(size) for size in sizes]
    if is_absolute and epoch_size is not None:
        raise ConfigError(
            f"`epoch_size` is {epoch_size} beside `repeat` or `choose`, which give the epoch its size: "
            "expected one of them; use `proportion` to divide an `epoch_size`"
        )
    if None in shares:
        raise ConfigError(f"the streams' proportions are {shares}: expected one for all streams or for none")
    parts = np.array(shares, np.float64)
    if not parts.sum() > 0:
        raise ConfigError("the streams' shares add up to 0: expected at least one above 0")
    result: NDArray[np.float64] = parts / parts.sum()
    return result


def resolve_counts(
    weights: Sequence[Weighted], sizes: Sequence[int], *, epoch_size: int | None, seed: int
) -> list[int]:
    """Return how many samples of each stream an epoch has.

    With proportions, or without weights and with an `epoch_size`, each stream has its share rounded down, and
    streams drawn by `seed`, the run's, have one more, until the epoch is full.

    Raises:
        ConfigError: See `resolve_shares`.
    """
    shares = resolve_shares(weights, sizes, epoch_size=epoch_size)
    if shares is None:
        return [_count(weight, size) for weight, size in zip(weights, sizes, strict=True)]
    total = sum(sizes) if epoch_size is None else epoch_size
    counts = np.floor(total * shares).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.random.default_rng(seed).choice(len(counts), missing, replace=False)] += 1
    return [int(count) for count in counts]


def draw(
    shard_sizes: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    sampling_method: str,
    granularity: int,
) -> tuple[list[int], Ids]:
    """Return an epoch's units and its samples along them, by their numbers in storage order.

    A unit is a shard, once for each time that the epoch has all of it, or a part of one.

    Args:
        shard_sizes: Samples of each shard, by stream.
        counts: Samples that the epoch has of each stream.
        seed: Of the run.
        epoch: From 0.
        shuffle: Whether shards' parts may differ from epoch to epoch.
        sampling_method: `balanced`, or `fixed`: every epoch has the same part of a stream.
        granularity: Samples drawn from one shard at a time.
    """
    sample_seed = seed + (epoch if sampling_method == "balanced" else 0)
    shard_seed = sample_seed if shuffle else seed
    units: list[int] = []
    ids = [np.zeros(0, np.int64)]
    first = 0
    rng = np.random.default_rng(sample_seed)
    for sizes, count in zip(shard_sizes, counts, strict=True):
        whole, rest = divmod(count, max(sum(sizes), 1))
        takes = _spread(sizes, rest, np.random.default_rng(shard_seed), granularity)
        for size, take in zip(sizes, takes, strict=True):
            units += [size] * whole
            ids += [np.arange(first, first + size)] * whole
            if take:
                units.append(take)
                is_part = take < size  # A shard that is taken whole asks nothing of the generator.
                part = np.sort(rng.choice(size, take, replace=False)) if is_part else np.arange(size)
                ids.append(first + part)
            first += size
    return units, np.concatenate(ids)


def _count(weight: Weighted, size: int) -> int:
    if weight.choose is not None:
        return int(weight.choose)
    return size if weight.repeat is None else math.floor(weight.repeat * size)


def _spread(sizes: Sequence[int], count: int, rng: np.random.Generator, granularity: int) -> list[int]:
    """How many of `count` samples each shard gives: whole grains in shuffled order, the last one cut."""
    takes = [0] * len(sizes)
    if not count:
        return takes
    grains = [
        (shard, min(granularity, size - start))
        for shard, size in enumerate(sizes)
        for start in range(0, size, granularity)
    ]
    rng.shuffle(grains)
    for shard, grain in grains:
        take = min(grain, count)
        takes[shard] += take
        count -= take
        if not count:
            break
    return takes
