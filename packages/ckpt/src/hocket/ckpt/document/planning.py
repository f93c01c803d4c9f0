"""Write planning: which rank writes which part of which tensor, computed identically on every rank.

Planning needs no communication. A tensor's placement on its mesh determines the box that every rank holds. A
box that one rank holds is written by that rank. A box that several ranks hold is written by one of them, or
split between them along rows, so that the bytes written per rank are balanced.
"""

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "SPLIT_BYTES",
    "Box",
    "BoxHolders",
    "PlannedTensor",
    "TensorPlacement",
    "WrittenPart",
    "boxes",
    "local_box",
    "plan_parts",
]

SPLIT_BYTES = 64 << 10
"""The size from which a replicated box is split between its holders; bounds the imbalance of a rank."""


class Box(NamedTuple):
    """A part of a tensor: its offsets and its shape."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_items(self) -> int:
        """The number of items in the box; 1 for a 0-d tensor."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The placement of a tensor on a mesh of ranks."""

    mesh_shape: tuple[int, ...]
    """Ranks along each axis of the mesh."""
    ranks: tuple[int, ...]
    """The mesh's global ranks, row-major."""
    cuts: tuple[int | None, ...]
    """Per mesh axis: the tensor dim that is sharded over the axis, or None if the axis replicates."""
    late: tuple[int, ...] = ()
    """Axes that shard after all later axes: FSDP over tensor parallelism, a strided shard in torch."""

    @property
    def order(self) -> list[int]:
        """Return the axes in the order in which they shard: left to right, then late axes right to left."""
        first = [axis for axis in range(len(self.cuts)) if axis not in self.late]
        return [*first, *sorted(self.late, reverse=True)]


class BoxHolders(NamedTuple):
    """A box and the ranks that hold it, in ascending order."""

    box: Box
    ranks: tuple[int, ...]


class PlannedTensor(NamedTuple):
    """A tensor to plan."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    placing: TensorPlacement
    owner: int | None = None
    """The rank that writes the whole tensor, if already decided; it must hold all of it."""


class WrittenPart(NamedTuple):
    """The part of a tensor that one rank writes: a contiguous range of the box that the rank holds."""

    name: str
    box: Box


def local_box(shape: Sequence[int], placing: TensorPlacement, rank: int) -> Box | None:
    """Return the box of a tensor that a rank holds, possibly empty; None if the rank is not in the mesh."""
    if rank not in placing.ranks:
        return None
    return _box_at(tuple(shape), placing, placing.ranks.index(rank))


@lru_cache(maxsize=65536)
def _box_at(shape: tuple[int, ...], placing: TensorPlacement, index: int) -> Box:
    positions = [0] * len(placing.mesh_shape)
    for axis in reversed(range(len(positions))):
        index, positions[axis] = divmod(index, placing.mesh_shape[axis])
    start, size = [0] * len(shape), list(shape)
    for axis in placing.order:
        dim, num_ranks, position = placing.cuts[axis], placing.mesh_shape[axis], positions[axis]
        if dim is None:
            continue
        # As torch.chunk: every piece has ⌈n/R⌉ rows, except the last non-empty one and the empty ones
        # after it.
        piece = -(-size[dim] // num_ranks)
        offset = min(position * piece, size[dim])
        start[dim] += offset
        size[dim] = min(piece, size[dim] - offset)
    return Box(tuple(start), tuple(size))


@lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], placing: TensorPlacement) -> tuple[BoxHolders, ...]:
    """Return all non-empty boxes of a tensor, sorted by offsets, each with the ranks that hold it."""
    holders: dict[Box, list[int]] = {}
    for index, rank in enumerate(placing.ranks):
        box = _box_at(shape, placing, index)
        if box.num_items:
            holders.setdefault(box, []).append(rank)
    return tuple(BoxHolders(box, tuple(sorted(ranks))) for box, ranks in sorted(holders.items()))


def plan_parts(
    items: Sequence[PlannedTensor], world_size: int, rank: int, peers: Collection[int] | None = None
) -> tuple[list[WrittenPart], list[int]]:
    """Plan the parts that a rank writes, and the bytes that every rank writes.

    Each rank writes the boxes that it alone holds. Replicated boxes are assigned group by group (a group is
    the set of ranks that hold the same boxes), smaller groups first: the boxes of a group are laid end to end
    and cut where each rank reaches the common level. A box smaller than `SPLIT_BYTES` is not split, so a rank
    may miss the level by half of that, or by half a row if rows are larger. Cost: one pass over the items,
    and one over each group's boxes.

    Parts held together with ranks outside of `peers` are assigned first, without regard to other loads,
    because that is all that their holders have in common.

    Args:
        items: The tensors; the same on every rank (with `peers`, on every peer) and in the same order.
        world_size: The number of ranks.
        rank: The rank whose parts are returned.
        peers: The ranks with these items, if other ranks have other items.

    Returns:
        The rank's parts in the order of the items, and the bytes per rank.
    """
    loads = [0] * world_size
    own_parts: dict[int, list[WrittenPart]] = {}
    groups: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for position, item in enumerate(items):
        if item.owner is not None:
            holdings: tuple[BoxHolders, ...] = (_whole(item, item.owner),) if math.prod(item.shape) else ()
        else:
            holdings = boxes(item.shape, item.placing)
        for box, ranks in holdings:
            if len(ranks) > 1:
                groups.setdefault(ranks, []).append((position, box))
                continue
            loads[ranks[0]] += box.num_items * item.item_bytes
            if ranks[0] == rank:
                own_parts.setdefault(position, []).append(WrittenPart(item.name, box))
    peer_ranks = range(world_size) if peers is None else frozenset(peers)
    is_among_peers = {ranks: all(holder in peer_ranks for holder in ranks) for ranks in groups}
    no_loads = [0] * world_size
    for ranks in sorted(groups, key=lambda ranks: (is_among_peers[ranks], len(ranks), ranks)):
        strip = [(position, box, items[position].item_bytes) for position, box in groups[ranks]]
        if not is_among_peers[ranks]:
            strip.sort(key=lambda one: items[one[0]].name)  # the holders' trees may differ in order
        for owner, position, box in _deal(strip, ranks, loads if is_among_peers[ranks] else no_loads):
            loads[owner] += box.num_items * items[position].item_bytes
            if owner == rank:
                own_parts.setdefault(position, []).append(WrittenPart(items[position].name, box))
    return [part for position in sorted(own_parts) for part in own_parts[position]], loads


def _whole(item: PlannedTensor, owner: int) -> BoxHolders:
    return BoxHolders(Box((0,) * len(item.shape), item.shape), (owner,))


def _deal(
    strip: Sequence[tuple[int, Box, int]], ranks: Sequence[int], loads: Sequence[int]
) -> Iterator[tuple[int, int, Box]]:
    """Assign boxes (position, box, item bytes) to ranks; yield (rank, position, part of the box)."""
    total = sum(box.num_items * item_bytes for _, box, item_bytes in strip)
    ends = list(itertools.accumulate(_quotas(total, [loads[rank] for rank in ranks])))
    offset = 0
    for position, box, item_bytes in strip:
        num_bytes = box.num_items * item_bytes
        dim = next((dim for dim, size in enumerate(box.size) if size > 1), None)
        if num_bytes < SPLIT_BYTES or dim is None:
            yield ranks[_taker(ends, offset + num_bytes // 2)], position, box
        else:
            yield from _cut(box, dim, num_bytes // box.size[dim], offset, ends, ranks, position)
        offset += num_bytes


def _cut(
    box: Box, dim: int, row_bytes: int, offset: int, ends: Sequence[int], ranks: Sequence[int], position: int
) -> Iterator[tuple[int, int, Box]]:
    """Split a box that begins at byte `offset` of the strip; `dim` is its first dim of more than one row."""
    row = 0
    while row < box.size[dim]:
        taker = _taker(ends, offset + row * row_bytes + row_bytes // 2)
        end_row = box.size[dim]
        if taker + 1 < len(ranks):
            end_row = min(end_row, max(row + 1, round((ends[taker] - offset) / row_bytes)))
        start = (*box.start[:dim], box.start[dim] + row, *box.start[dim + 1 :])
        yield ranks[taker], position, Box(start, (*box.size[:dim], end_row - row, *box.size[dim + 1 :]))
        row = end_row


def _taker(ends: Sequence[int], offset: int) -> int:
    return min(bisect.bisect_right(ends, offset), len(ends) - 1)


def _quotas(total: int, loads: Sequence[int]) -> list[int]:
    """Return how many of `total` bytes each rank gets, so that the lowest loads rise to a common level."""
    filled, ascending = 0, sorted(loads)
    level = ascending[-1]
    for position, load in enumerate(ascending):
        # Check whether raising the `position` lowest loads to `load` exceeds the total.
        if load * position - filled > total:
            level = -(-(total + filled) // position)
            break
        filled += load
    else:
        level = -(-(total + filled) // len(ascending))
    quotas = [max(0, level - load) for load in loads]
    surplus = sum(quotas) - total  # from rounding up: less than one byte per rank
    for position, quota in enumerate(quotas):
        reduction = min(quota, surplus)
        quotas[position] -= reduction
        surplus -= reduction
    return quotas
