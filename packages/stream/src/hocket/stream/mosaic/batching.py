"""mosaicml-streaming's global batches that are made of the streams one by one, and not of all of them mixed.

There are whole batches only. What a stream has left when no batch can be filled any more is not in the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError

Batches = NDArray[np.int64]
METHODS = ("random", "stratified", "per_stream")


def portions(shares: Sequence[float], global_batch: int) -> list[int]:
    """Return how many samples of each stream a stratified batch has.

    That is the stream's share of the batch rounded down, and one more for those that lost most by it.

    Args:
        shares: Of the streams in the epoch; they add up to 1.
        global_batch: Samples of a batch over all ranks.

    Raises:
        ConfigError: A stream has none.
    """
    exact = global_batch * np.array(shares)
    parts = np.floor(exact).astype(np.int64)
    missing = global_batch - int(parts.sum())
    parts[np.argsort(exact - parts)[::-1][:missing]] += 1
    if (parts < 1).any():
        number = int(np.argmin(parts))
        raise ConfigError(
            f"stream {number} has a share of {shares[number]:.3g} in the epoch, and so 0 of a batch's "
            f"{global_batch} samples: expected at least 1 with `batching_method='stratified'`; make the "
            "batch larger or the stream's share"
        )
    return [int(part) for part in parts]


def stratify(streams: Sequence[Batches], parts: Sequence[int]) -> Batches:
    """Return global batches, `(batches, samples) int64`, each with the next `parts` of the streams in turn.

    Args:
        streams: Each one's samples in order.
        parts: Samples of each in a batch.
    """
    count = min(len(samples) // part for samples, part in zip(streams, parts, strict=True))
    rows = [
        samples[: count * part].reshape(count, part) for samples, part in zip(streams, parts, strict=True)
    ]
    return np.concatenate(rows, axis=1)


def take_turns(streams: Sequence[Batches], global_batch: int, *, seed: int) -> Batches:
    """Return global batches, `(batches, global_batch) int64`, of one stream each, as the streams' turns fall.

    Args:
        streams: Each one's samples in order.
        global_batch: Samples of a batch over all ranks.
        seed: Of the turns.

    Raises:
        ConfigError: A stream does not fill one batch.
    """
    counts = [len(samples) // global_batch for samples in streams]
    if 0 in counts:
        number = counts.index(0)
        raise ConfigError(
            f"stream {number} has {len(streams[number])} samples in the epoch: expected at least the "
            f"{global_batch} of a batch with `batching_method='per_stream'`; make the batch smaller or the "
            "stream's share larger"
        )
    turns = np.repeat(np.arange(len(streams)), counts)
    np.random.default_rng(seed).shuffle(turns)
    rows = [samples[: count * global_batch] for samples, count in zip(streams, counts, strict=True)]
    batches = np.empty((len(turns), global_batch), np.int64)
    # Each stream's batches stay in their order: the first of them at the first of its turns.
    batches[np.argsort(turns, kind="stable")] = np.concatenate(rows).reshape(-1, global_batch)
    return batches
