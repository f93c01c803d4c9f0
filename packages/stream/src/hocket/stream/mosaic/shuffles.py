"""mosaicml-streaming's five shuffles: NumPy's generator, asked the same questions in the same order.

All but `naive` first shuffle the units (shards, or parts of them) by the seed alone, cut them at the bounds
of the canonical nodes, and then, by seed and epoch, mix each node's samples without crossing its bounds.
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
    """What a shuffle depends on."""

    unit_sizes: Sequence[int]
    """Samples of each unit; the samples are numbered along the units."""

    num_canonical_nodes: int
    """Parts that are mixed each within itself."""

    seed: int
    """Of the run."""

    epoch: int
    """From 0."""

    block_size: int
    """Samples, for `py1br` and `py1e`; from 2."""

    def run(self, algo: str) -> Ids:
        """Return the samples of the epoch in shuffled order, `(num_samples,) int64`; see `ALGORITHMS`."""
        return ALGORITHMS[algo](self)

    def for_run(self) -> np.random.Generator:
        """Return the generator of what stays the same in all epochs."""
        return np.random.default_rng(self.seed)

    def for_epoch(self) -> np.random.Generator:
        """Return the generator of the epoch."""
        return np.random.default_rng(self.seed + self.epoch)


def _naive(given: Shuffle) -> Ids:
    """All samples, anywhere."""
    return given.for_epoch().permutation(sum(given.unit_sizes))


def _py1s(given: Shuffle) -> Ids:
    """Samples within their unit's part."""
    nodes, rng = _shuffled_spans(given)
    parts = [np.arange(*span) for spans in nodes for span in spans]
    for part in parts:
        rng.shuffle(part)
    return _join(parts)


def _py2s(given: Shuffle) -> Ids:
    """As `py1s`, of units whose samples were shuffled once for the run before they were cut."""
    spans = _spans(given.unit_sizes)
    rng = given.for_run()
    rng.shuffle(spans)
    units = [np.arange(*span) for span in spans]
    for unit in units:
        rng.shuffle(unit)
    ids = _join(units)
    rng = given.for_epoch()
    parts = []
    for node in _cut(_spans([len(unit) for unit in units]), given.num_canonical_nodes):
        rng.shuffle(node)
        for start, end in node:
            part = ids[start:end].copy()
            rng.shuffle(part)
            parts.append(part)
    return _join(parts)


def _py1br(given: Shuffle) -> Ids:
    """Samples within blocks of about `block_size`, cut elsewhere in each node and epoch."""
    nodes, rng = _shuffled_spans(given)
    least, most = int(0.75 * given.block_size), int(1.25 * given.block_size)
    staggers = rng.integers(0, least, given.num_canonical_nodes).tolist()
    parts = []
    for spans, stagger in zip(nodes, staggers, strict=True):
        ids = _join(np.arange(*span) for span in spans)
        blocks: list[Span] = []
        place = 0
        while place < len(ids):
            end = place - stagger + int(rng.integers(least, most))
            blocks.append((max(place - stagger, 0), min(end, len(ids))))
            place += blocks[-1][1] - blocks[-1][0]
        for start, end in blocks:
            rng.shuffle(ids[start:end])
        parts.append(ids)
    return _join(parts)


def _py1e(given: Shuffle) -> Ids:
    """Samples moved by up to half a block to either side of where `py1s` has them."""
    nodes, rng = _shuffled_spans(given)
    least, most = int(0.75 * given.block_size), int(1.25 * given.block_size)
    parts = []
    for spans in nodes:
        units = [np.arange(*span) for span in spans]
        for unit in units:
            rng.shuffle(unit)
        ids = _join(units)
        shifts = []
        start = 0
        for unit in units:
            size = int(rng.integers(least, most))
            reach = max((size - len(unit)) / 2, 0)
            end = start + len(unit)
            shifts.append(rng.uniform(-min(start, reach), min(len(ids) - end, reach), len(unit)))
            start = end
        places = np.arange(len(ids)) + (np.concatenate(shifts) if shifts else 0.0)
        parts.append(ids[np.argsort(places, kind="stable")])
    return _join(parts)


#: The shuffles by name.
ALGORITHMS: dict[str, Callable[[Shuffle], Ids]] = {
    "naive": _naive,
    "py1s": _py1s,
    "py2s": _py2s,
    "py1br": _py1br,
    "py1e": _py1e,
}
#: Those of them that know blocks.
BLOCK_ALGORITHMS = ("py1br", "py1e")


def _shuffled_spans(given: Shuffle) -> tuple[Nodes, np.random.Generator]:
    """Each canonical node's spans of samples in the epoch's order, and the generator to go on with."""
    spans = _spans(given.unit_sizes)
    given.for_run().shuffle(spans)
    nodes = _cut(spans, given.num_canonical_nodes)
    rng = given.for_epoch()
    for node in nodes:
        rng.shuffle(node)
    return nodes, rng


def _spans(sizes: Sequence[int]) -> list[Span]:
    edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
    return list(itertools.pairwise(edges))


def _cut(spans: list[Span], num_nodes: int) -> Nodes:
    """Deal spans out to nodes of equal numbers of samples. An empty span stays where the one before ended."""
    total = sum(end - start for start, end in spans)
    bounds = [number * total // num_nodes for number in range(1, num_nodes + 1)]
    nodes: Nodes = [[] for _ in range(num_nodes)]
    node = place = 0
    for start, end in spans:
        while end - start > (room := bounds[node] - place):
            if room:
                nodes[node].append((start, start + room))
            start, place = start + room, place + room
            node += 1
        nodes[node].append((start, end))
        place += end - start
    return nodes


def _join(parts: Iterable[Ids]) -> Ids:
    return np.concatenate([np.zeros(0, np.int64), *parts])
