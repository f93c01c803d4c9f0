"""The five shuffle algorithms of mosaicml-streaming, with the same sequence of calls to NumPy's generator.

All but `naive` shuffle the units (shards, or parts of shards) with the seed alone, cut them at the
boundaries of the canonical nodes, and then shuffle the samples of each node with seed and epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Span = tuple[int, int]
Nodes = list[list[Span]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """The parameters of a shuffle."""

    unit_sizes: Sequence[int]
    """Number of samples in each unit; samples are numbered along the units."""

    num_canonical_nodes: int
    """Number of parts that are shuffled separately."""

    seed: int
    """Seed of the run."""

    epoch: int
    """The epoch."""

    block_size: int
    """Number of samples in a block of `py1br` and `py1e`; at least 2."""

    def run(self, algo: str) -> Ids:
        """Return the samples of the epoch in shuffled order, `(num_samples,) int64`; see `ALGORITHMS`."""
        return ALGORITHMS[algo](self)

    def for_run(self) -> np.random.Generator:
        """Return the generator whose draws are the same in all epochs."""
        return np.random.default_rng(self.seed)

    def for_epoch(self) -> np.random.Generator:
        """Return the generator of this epoch."""
        return np.random.default_rng(self.seed + self.epoch)


def _naive(shuffle: Shuffle) -> Ids:
    """Shuffle all samples."""
    return shuffle.for_epoch().permutation(sum(shuffle.unit_sizes))


def _py1s(shuffle: Shuffle) -> Ids:
    """Shuffle the samples within the parts of units."""
    nodes, rng = _shuffled_spans(shuffle)
    parts = [np.arange(*span) for spans in nodes for span in spans]
    for part in parts:
        rng.shuffle(part)
    return _join(parts)


def _py2s(shuffle: Shuffle) -> Ids:
    """Shuffle as `py1s`, after shuffling the samples of each unit once for the run."""
    spans = _spans(shuffle.unit_sizes)
    rng = shuffle.for_run()
    rng.shuffle(spans)
    units = [np.arange(*span) for span in spans]
    for unit in units:
        rng.shuffle(unit)
    ids = _join(units)
    rng = shuffle.for_epoch()
    parts = []
    for node in _cut(_spans([len(unit) for unit in units]), shuffle.num_canonical_nodes):
        rng.shuffle(node)
        for start, end in node:
            part = ids[start:end].copy()
            rng.shuffle(part)
            parts.append(part)
    return _join(parts)


def _py1br(shuffle: Shuffle) -> Ids:
    """Shuffle within blocks of about `block_size`, with random boundaries in each node and epoch."""
    nodes, rng = _shuffled_spans(shuffle)
    min_size, max_size = int(0.75 * shuffle.block_size), int(1.25 * shuffle.block_size)
    staggers = rng.integers(0, min_size, shuffle.num_canonical_nodes).tolist()
    parts = []
    for spans, stagger in zip(nodes, staggers, strict=True):
        ids = _join(np.arange(*span) for span in spans)
        blocks: list[Span] = []
        position = 0
        while position < len(ids):
            end = position - stagger + int(rng.integers(min_size, max_size))
            blocks.append((max(position - stagger, 0), min(end, len(ids))))
            position += blocks[-1][1] - blocks[-1][0]
        for start, end in blocks:
            rng.shuffle(ids[start:end])
        parts.append(ids)
    return _join(parts)


def _py1e(shuffle: Shuffle) -> Ids:
    """Move each sample by up to half a block from its position in `py1s`."""
    nodes, rng = _shuffled_spans(shuffle)
    min_size, max_size = int(0.75 * shuffle.block_size), int(1.25 * shuffle.block_size)
    parts = []
    for spans in nodes:
        units = [np.arange(*span) for span in spans]
        for unit in units:
            rng.shuffle(unit)
        ids = _join(units)
        shifts = []
        start = 0
        for unit in units:
            size = int(rng.integers(min_size, max_size))
            reach = max((size - len(unit)) / 2, 0)
            end = start + len(unit)
            shifts.append(rng.uniform(-min(start, reach), min(len(ids) - end, reach), len(unit)))
            start = end
        positions = np.arange(len(ids)) + (np.concatenate(shifts) if shifts else 0.0)
        parts.append(ids[np.argsort(positions, kind="stable")])
    return _join(parts)


#: The shuffle algorithms by name.
ALGORITHMS: dict[str, Callable[[Shuffle], Ids]] = {
    "naive": _naive,
    "py1s": _py1s,
    "py2s": _py2s,
    "py1br": _py1br,
    "py1e": _py1e,
}
#: The algorithms that use blocks.
BLOCK_ALGORITHMS = ("py1br", "py1e")


def _shuffled_spans(shuffle: Shuffle) -> tuple[Nodes, np.random.Generator]:
    """Return the spans of each canonical node in the order of the epoch, and the generator of the epoch."""
    spans = _spans(shuffle.unit_sizes)
    shuffle.for_run().shuffle(spans)
    nodes = _cut(spans, shuffle.num_canonical_nodes)
    rng = shuffle.for_epoch()
    for node in nodes:
        rng.shuffle(node)
    return nodes, rng


def _spans(sizes: Sequence[int]) -> list[Span]:
    edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
    return list(itertools.pairwise(edges))


def _cut(spans: list[Span], num_nodes: int) -> Nodes:
    """Split spans between nodes of equal size. An empty span stays with the span before it."""
    total = sum(end - start for start, end in spans)
    bounds = [number * total // num_nodes for number in range(1, num_nodes + 1)]
    nodes: Nodes = [[] for _ in range(num_nodes)]
    node = position = 0
    for start, end in spans:
        while end - start > (room := bounds[node] - position):
            if room:
                nodes[node].append((start, start + room))
            start, position = start + room, position + room
            node += 1
        nodes[node].append((start, end))
        position += end - start
    return nodes


def _join(parts: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int64), *parts])
