"""Which rank writes which part of which tensor: pure arithmetic, computed alike on every rank.

No rank asks another. A tensor's placement on its mesh says which box of it every rank holds; a box that only
one rank holds is written by that rank; a box that several hold is written by one of them, or cut over them in
rows, so that the bytes that the ranks write are as even as they can be.
"""

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

__all__ = ["SPLIT_BYTES", "Box", "Holding", "Item", "Part", "Placing", "boxes", "local_box", "plan_parts"]

SPLIT_BYTES = 64 << 10
"""A replicated box is cut over its holders only from this size on: by so much rounding unbalances a rank."""


class Box(NamedTuple):
    """A part of a tensor: where it begins and its shape, per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_items(self) -> int:
        """How many items are in it; 1 for a 0-d tensor."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Placing:
    """How a tensor lies on a mesh of ranks."""

    mesh_shape: tuple[int, ...]
    """Ranks along each axis of the mesh."""
    ranks: tuple[int, ...]
    """The mesh's global ranks, row-major."""
    cuts: tuple[int | None, ...]
    """Per mesh axis: the tensor's dim that it cuts into near-equal pieces, or None where it replicates."""
    late: tuple[int, ...] = ()
    """Axes that cut after all axes behind them: FSDP over tensor parallelism, which torch calls strided."""

    @property
    def order(self) -> list[int]:
        """The axes in the order in which they cut: left to right, then the late ones from right to left."""
        first = [axis for axis in range(len(self.cuts)) if axis not in self.late]
        return [*first, *sorted(self.late, reverse=True)]


class Holding(NamedTuple):
    """A box and the ranks that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


class Item(NamedTuple):
    """A tensor to plan for."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    placing: Placing
    owner: int | None = None
    """The rank that writes all of it, where that is settled already; it must hold all of it."""


class Part(NamedTuple):
    """What one rank writes of a tensor. Its bytes are one run of the box that the rank holds."""

    name: str
    box: Box


def local_box(shape: Sequence[int], placing: Placing, rank: int) -> Box | None:
    """The box of a tensor that a rank holds, possibly empty; None where the rank is not in the mesh."""
    if rank not in placing.ranks:
        return None
    return _box_at(tuple(shape), placing, placing.ranks.index(rank))


@lru_cache(maxsize=65536)
def _box_at(shape: tuple[int, ...], placing: Placing, index: int) -> Box:
    positions = [0] * len(placing.mesh_shape)
    for axis in reversed(range(len(positions))):
        index, positions[axis] = divmod(index, placing.mesh_shape[axis])
    start, size = [0] * len(shape), list(shape)
    for axis in placing.order:
        dim, num_ranks, position = placing.cuts[axis], placing.mesh_shape[axis], positions[axis]
        if dim is None:
            continue
        # As torch.chunk cuts: all pieces ⌈n/R⌉ but for the last, which is shorter, and those behind it,
        # empty.
        piece = -(-size[dim] // num_ranks)
        offset = min(position * piece, size[dim])
        start[dim] += offset
        size[dim] = min(piece, size[dim] - offset)
    return Box(tuple(start), tuple(size))


@lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], placing: Placing) -> tuple[Holding, ...]:
    """All boxes of a tensor with something in them, by where they begin, each with the ranks that hold it."""
    holders: dict[Box, list[int]] = {}
    for index, rank in enumerate(placing.ranks):
        box = _box_at(shape, placing, index)
        if box.num_items:
            holders.setdefault(box, []).append(rank)
    return tuple(Holding(box, tuple(sorted(ranks))) for box, ranks in sorted(holders.items()))


def plan_parts(
    items: Sequence[Item], world_size: int, rank: int, peers: Collection[int] | None = None
) -> tuple[list[Part], list[int]]:
    """What a rank writes, and the bytes that every rank writes.

    Boxes that one rank holds are its own. The others are dealt out group by group (a group: the ranks that
    hold the same boxes), smaller groups first, as one long strip of bytes that is cut where each rank has
    reached the common level. A box of less than `SPLIT_BYTES` is not cut, so a rank may miss the level by
    half of that, or by half a row where rows are larger. Cost: one pass over the items, and one over each
    group's boxes.

    What a rank holds together with others than its `peers` is dealt first, as if nothing else were written:
    that much all of its holders know.

    Args:
        items: The same on every rank, in the same order; with `peers`, on each of these.
        world_size: How many ranks.
        rank: Whose parts are wanted.
        peers: The ranks with these items, where others have other items.

    Returns:
        The rank's parts in the order of the items, and bytes by rank.
    """
    loads = [0] * world_size
    mine: dict[int, list[Part]] = {}
    groups: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for position, item in enumerate(items):
        if item.owner is not None:
            holdings: tuple[Holding, ...] = (_whole(item, item.owner),) if math.prod(item.shape) else ()
        else:
            holdings = boxes(item.shape, item.placing)
        for box, ranks in holdings:
            if len(ranks) > 1:
                groups.setdefault(ranks, []).append((position, box))
                continue
            loads[ranks[0]] += box.num_items * item.item_bytes
            if ranks[0] == rank:
                mine.setdefault(position, []).append(Part(item.name, box))
    everyone = range(world_size) if peers is None else frozenset(peers)
    known = {ranks: all(holder in everyone for holder in ranks) for ranks in groups}
    nothing = [0] * world_size
    for ranks in sorted(groups, key=lambda ranks: (known[ranks], len(ranks), ranks)):
        strip = [(position, box, items[position].item_bytes) for position, box in groups[ranks]]
        if not known[ranks]:
            strip.sort(key=lambda one: items[one[0]].name)  # their holders' trees may have other orders
        for owner, position, box in _deal(strip, ranks, loads if known[ranks] else nothing):
            loads[owner] += box.num_items * items[position].item_bytes
            if owner == rank:
                mine.setdefault(position, []).append(Part(items[position].name, box))
    return [part for position in sorted(mine) for part in mine[position]], loads


def _whole(item: Item, owner: int) -> Holding:
    return Holding(Box((0,) * len(item.shape), item.shape), (owner,))


def _deal(
    strip: Sequence[tuple[int, Box, int]], ranks: Sequence[int], loads: Sequence[int]
) -> Iterator[tuple[int, int, Box]]:
    """Deals boxes (position, box, bytes of an item) to ranks; yields (rank, position, part of the box)."""
    total = sum(box.num_items * item_bytes for _, box, item_bytes in strip)
    ends = list(itertools.accumulate(_quotas(total, [loads[rank] for rank in ranks])))
    at = 0
    for position, box, item_bytes in strip:
        num_bytes = box.num_items * item_bytes
        dim = next((dim for dim, size in enumerate(box.size) if size > 1), None)
        if num_bytes < SPLIT_BYTES or dim is None:
            yield ranks[_taker(ends, at + num_bytes // 2)], position, box
        else:
            yield from _cut(box, dim, num_bytes // box.size[dim], at, ends, ranks, position)
        at += num_bytes


def _cut(
    box: Box, dim: int, row_bytes: int, at: int, ends: Sequence[int], ranks: Sequence[int], position: int
) -> Iterator[tuple[int, int, Box]]:
    """Cuts a box that begins at byte `at` of the strip along `dim`, the first with more than one row."""
    row = 0
    while row < box.size[dim]:
        taker = _taker(ends, at + row * row_bytes + row_bytes // 2)
        until = box.size[dim]
        if taker + 1 < len(ranks):
            until = min(until, max(row + 1, round((ends[taker] - at) / row_bytes)))
        start = (*box.start[:dim], box.start[dim] + row, *box.start[dim + 1 :])
        yield ranks[taker], position, Box(start, (*box.size[:dim], until - row, *box.size[dim + 1 :]))
        row = until


def _taker(ends: Sequence[int], at: int) -> int:
    return min(bisect.bisect_right(ends, at), len(ends) - 1)


def _quotas(total: int, loads: Sequence[int]) -> list[int]:
    """How many of `total` bytes each rank takes, so that the lowest loads rise to one common level."""
    filled, ascending = 0, sorted(loads)
    level = ascending[-1]
    for position, load in enumerate(ascending):
        # With the `position` lowest raised to `load`, have we used up more than there is?
        if load * position - filled > total:
            level = -(-(total + filled) // position)
            break
        filled += load
    else:
        level = -(-(total + filled) // len(ascending))
    quotas = [max(0, level - load) for load in loads]
    surplus = sum(quotas) - total  # of rounding up: less than one byte a rank
    for position, quota in enumerate(quotas):
        taken = min(quota, surplus)
        quotas[position] -= taken
        surplus -= taken
    return quotas
