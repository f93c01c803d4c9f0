"""Sampling of streams in an epoch, as in mosaicml-streaming."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError
from hocket.stream.settings.weights import StreamWeights

Ids = NDArray[np.int64]


def resolve_shares(
    weights: Sequence[StreamWeights], sizes: Sequence[int], *, epoch_size: int | None
) -> NDArray[np.float64] | None:
    """Return each stream's share of an epoch; None if the weights are absolute.

    Args:
        weights: Weights of the streams.
        sizes: Number of samples in each stream.
        epoch_size: Number of samples in an epoch.

    Raises:
        ConfigError: Only some streams have a proportion, all proportions are 0, or `epoch_size` is given
            beside `repeat` or `choose`.
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
    weights: Sequence[StreamWeights], sizes: Sequence[int], *, epoch_size: int | None, seed: int
) -> list[int]:
    """Return the number of samples of each stream in an epoch.

    With proportions, or with `epoch_size` and no weights, shares are rounded down, and streams chosen at
    random with `seed` get one more until the epoch is full.

    Raises:
        ConfigError: As `resolve_shares`.
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
    """Return the sizes of an epoch's shuffle units, and the samples of all units as numbers in storage order.

    A unit is a whole shard, once per repetition, or the sampled part of a shard.

    Args:
        shard_sizes: Number of samples in each shard, by stream.
        counts: Number of samples of each stream in the epoch.
        seed: Seed of the run.
        epoch: The epoch.
        shuffle: Whether the parts of shards may differ between epochs.
        sampling_method: `balanced`, or `fixed` for the same part of a stream in all epochs.
        granularity: Number of samples drawn from one shard at a time.
    """
    sample_seed = seed + (epoch if sampling_method == "balanced" else 0)
    shard_seed = sample_seed if shuffle else seed
    units: list[int] = []
    ids = [np.zeros(0, np.int64)]
    first = 0
    rng = np.random.default_rng(sample_seed)
    for sizes, count in zip(shard_sizes, counts, strict=True):
        num_repeats, rest = divmod(count, max(sum(sizes), 1))
        takes = _spread(sizes, rest, np.random.default_rng(shard_seed), granularity)
        for size, take in zip(sizes, takes, strict=True):
            units += [size] * num_repeats
            ids += [np.arange(first, first + size)] * num_repeats
            if take:
                units.append(take)
                is_part = take < size  # The generator is not used for a whole shard.
                part = np.sort(rng.choice(size, take, replace=False)) if is_part else np.arange(size)
                ids.append(first + part)
            first += size
    return units, np.concatenate(ids)


def _count(weight: StreamWeights, size: int) -> int:
    if weight.choose is not None:
        return int(weight.choose)
    return size if weight.repeat is None else math.floor(weight.repeat * size)


def _spread(sizes: Sequence[int], count: int, rng: np.random.Generator, granularity: int) -> list[int]:
    """Return the samples taken from each shard: whole grains in random order, the last one cut."""
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
