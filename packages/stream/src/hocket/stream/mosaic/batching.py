"""Stratified, per-stream and per-device batches, as in mosaicml-streaming.

All batches are full. Samples that do not fill a batch are left out of the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError

Batches = NDArray[np.int64]
METHODS = ("random", "stratified", "per_stream", "device_per_stream")
_VOID = -1


def portions(shares: Sequence[float], global_batch: int) -> list[int]:
    """Return the number of samples of each stream in a stratified batch, by largest remainder.

    Args:
        shares: Share of each stream in the epoch; the sum is 1.
        global_batch: Number of samples in a batch over all ranks.

    Raises:
        ConfigError: A stream has no sample in a batch.
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
    """Return global batches, `(batches, samples) int64`, each with the next `parts` samples of the streams.

    Args:
        streams: Samples of each stream, in order.
        parts: Number of samples of each stream in a batch.
    """
    count = min(len(samples) // part for samples, part in zip(streams, parts, strict=True))
    rows = [
        samples[: count * part].reshape(count, part) for samples, part in zip(streams, parts, strict=True)
    ]
    return np.concatenate(rows, axis=1)


def take_turns(streams: Sequence[Batches], global_batch: int, *, seed: int) -> Batches:
    """Return global batches, `(batches, global_batch) int64`, of one stream each, in random order.

    Args:
        streams: Samples of each stream, in order.
        global_batch: Number of samples in a batch over all ranks.
        seed: Seed of the order of streams.

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
    return _interleave(streams, counts, global_batch, np.random.default_rng(seed))


def take_device_turns(
    nodes: Sequence[Sequence[Batches]], batch_size: int, *, world_size: int, seed: int
) -> Batches:
    """Return global batches, `(batches, world_size * batch_size) int64`; each rank's part has one stream.

    The device batches of all nodes are taken in turn, and dealt to the ranks in order. A node with fewer is
    padded with device batches of -1, so the last global batches may lack some ranks' parts.

    Args:
        nodes: Samples of each stream on each node, in order.
        batch_size: Number of samples in a batch on each rank.
        world_size: Number of ranks.
        seed: Seed of the order of streams.

    Raises:
        ConfigError: A stream does not fill one device batch on a node.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for node, streams in enumerate(nodes):
        counts = [len(samples) // batch_size for samples in streams]
        if 0 in counts:
            number = counts.index(0)
            raise ConfigError(
                f"stream {number} has {len(streams[number])} samples on node {node}: expected at least the "
                f"{batch_size} of a rank's batch with `batching_method='device_per_stream'`; make the batch "
                "smaller or the stream's share larger"
            )
        batches.append(_interleave(streams, counts, batch_size, rng))
    longest = max(map(len, batches))
    longest += -longest % world_size
    padded = np.full((longest, len(nodes), batch_size), _VOID, np.int64)
    for node, node_batches in enumerate(batches):
        padded[: len(node_batches), node] = node_batches
    rows: Batches = padded.reshape(-1, world_size * batch_size)
    filled: Batches = rows[(rows != _VOID).any(axis=1)]
    return filled


def _interleave(
    streams: Sequence[Batches], counts: Sequence[int], batch_size: int, rng: np.random.Generator
) -> Batches:
    """Return `counts` batches of each stream, `(batches, batch_size) int64`, in random order."""
    turns = np.repeat(np.arange(len(streams)), counts)
    rng.shuffle(turns)
    rows = [samples[: count * batch_size] for samples, count in zip(streams, counts, strict=True)]
    batches = np.empty((len(turns), batch_size), np.int64)
    # The batches of one stream stay in order.
    batches[np.argsort(turns, kind="stable")] = np.concatenate(rows).reshape(-1, batch_size)
    return batches
