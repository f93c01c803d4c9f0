"""Matrices that are cut over ranks: each goes whole to one rank, its owner, and its result back as shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.trainer.ranks.rank_gather import gather_objects
from hocket.trainer.ranks.sharded_tensors import refuse_unequal_shards


class Box(NamedTuple):
    """The part of a tensor that one rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


class _Transfer(NamedTuple):
    """An exchange under way."""

    work: Any
    received: Tensor
    sent: Tensor
    """Kept until the exchange has ended."""
    counts: list[int]
    """Items received from each rank."""

    def wait(self) -> tuple[Tensor, ...]:
        """Return what each rank sent."""
        self.work.wait()
        return torch.split(self.received, self.counts)


class MatrixExchange:
    """Applies a function of whole matrices to matrices that are cut over the same ranks.

    Each matrix has one owner, so that every rank computes about as much. An item travels twice, to the owner
    and back. At most three matrices a rank are whole at a time: the next one, the present one, and the result
    that is being sent.

    Args:
        tensors: `DTensor`s on one mesh, cut by the same of its axes. Collective: every rank of these axes
            makes the exchange for the same tensors.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        first = tensors[0]
        self._device_type: str = first.device_mesh.device_type
        self._group = _group(first)
        self._rank = dist.get_rank(self._group)
        own = [_own_box(tensor) for tensor in tensors]
        self._boxes = gather_objects(own, self._group)
        self._shapes = [
            (*box.sizes[:-2], *tensor.shape[-2:]) for tensor, box in zip(tensors, own, strict=True)
        ]
        self._owned = _divide([_cost(shape) for shape in self._shapes], len(self._boxes))

    def apply(
        self, parts: Sequence[Tensor | None], function: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """Return this rank's shards of `function` of each whole matrix. Collective.

        Args:
            parts: This rank's shard of each tensor; None leaves that tensor out, on all ranks alike.
            function: From a tensor of `dtype` to one of the same shape and dtype.
            dtype: What the matrices travel as.

        Returns:
            A tensor of `dtype` for each of `parts` that is not None, in their order.
        """
        taken = [[index for index in owned if parts[index] is not None] for owned in self._owned]
        rounds = [
            [owned[turn] if turn < len(owned) else None for owned in taken]
            for turn in range(max(map(len, taken)))
        ]
        results: dict[int, Tensor] = {}
        returning: tuple[list[int | None], _Transfer] | None = None
        # The next matrices travel while those that are here are computed.
        coming = self._send_parts(parts, rounds[0], dtype) if rounds else None
        for turn, matrices in enumerate(rounds):
            assert coming is not None
            pieces = coming.wait()
            coming = self._send_parts(parts, rounds[turn + 1], dtype) if turn + 1 < len(rounds) else None
            mine = matrices[self._rank]
            result = None if mine is None else function(self._join(mine, pieces))
            if returning is not None:
                results |= self._take_returned(*returning)  # which frees the matrix that was sent
            returning = matrices, self._send_result(mine, result, matrices, dtype)
        if returning is not None:
            results |= self._take_returned(*returning)
        return [results[index] for index, part in enumerate(parts) if part is not None]

    def _send_parts(
        self, parts: Sequence[Tensor | None], matrices: list[int | None], dtype: torch.dtype
    ) -> _Transfer:
        """Send this rank's part of each matrix to its owner."""
        sent = [_flat(parts[index]) for index in matrices if index is not None]
        outgoing = [self._count(self._rank, index) for index in matrices]
        mine = matrices[self._rank]
        incoming = [self._count(rank, mine) for rank in range(len(matrices))]
        return self._exchange(sent, outgoing, incoming, dtype)

    def _send_result(
        self, mine: int | None, result: Tensor | None, matrices: list[int | None], dtype: torch.dtype
    ) -> _Transfer:
        """Send to each rank its part of this rank's result."""
        sent = []
        if mine is not None and result is not None:
            sent = [_flat(result[boxes[mine].slices]) for boxes in self._boxes]
        outgoing = [self._count(rank, mine) for rank in range(len(matrices))]
        incoming = [self._count(self._rank, index) for index in matrices]
        return self._exchange(sent, outgoing, incoming, dtype)

    def _take_returned(self, matrices: list[int | None], transfer: _Transfer) -> dict[int, Tensor]:
        """Return this rank's part of each result by the matrix's index."""
        return {
            index: piece.view(self._boxes[self._rank][index].sizes)
            for index, piece in zip(matrices, transfer.wait(), strict=True)
            if index is not None
        }

    def _exchange(
        self, sent: list[Tensor], outgoing: list[int], incoming: list[int], dtype: torch.dtype
    ) -> _Transfer:
        device = next((one.device for one in sent if one.device.type == self._device_type), None)
        device = device or torch.device(self._device_type)  # shards may lie in host memory
        buffer = torch.empty(sum(outgoing), dtype=dtype, device=device)
        at = 0
        for one in sent:
            buffer[at : at + one.numel()] = one
            at += one.numel()
        received = torch.empty(sum(incoming), dtype=dtype, device=device)
        work = dist.all_to_all_single(received, buffer, incoming, outgoing, group=self._group, async_op=True)
        return _Transfer(work, received, buffer, incoming)

    def _join(self, index: int, pieces: Sequence[Tensor]) -> Tensor:
        whole = pieces[0].new_empty(self._shapes[index])
        for boxes, piece in zip(self._boxes, pieces, strict=True):
            whole[boxes[index].slices] = piece.view(boxes[index].sizes)
        return whole

    def _count(self, rank: int, index: int | None) -> int:
        return 0 if index is None else math.prod(self._boxes[rank][index].sizes)


def cut_axes(tensor: Any) -> tuple[int, ...]:
    """Return the axes of the mesh that cut the matrices of a tensor; () for one that is no `DTensor`.

    An axis that cuts a leading dim, as experts are cut, leaves the matrices whole.
    """
    if not hasattr(tensor, "placements"):
        return ()
    mesh = tensor.device_mesh
    # By the attribute: the strided shard of `fully_shard` over tensor parallelism is no `Shard`.
    return tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim") and placement.dim >= tensor.ndim - 2 and mesh.size(axis) > 1
    )


def _group(tensor: Any) -> dist.ProcessGroup:
    """Return the process group of the ranks among which a tensor's matrices are cut. Collective for these."""
    mesh, axes = tensor.device_mesh, cut_axes(tensor)
    group: Any = mesh.get_group(axes[0])
    if len(axes) == 1:
        return cast("dist.ProcessGroup", group)
    # Not the mesh's own `_flatten`: torch 2.15 then gathers unequal shards of that mesh in a wrong order.
    own = mesh.get_coordinate()
    index = tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))
    timeout = max(group._get_backend(device).options._timeout for device in group._device_types)
    ranks = mesh.mesh[index].flatten().tolist()
    return cast("dist.ProcessGroup", dist.new_group(ranks, timeout=timeout, use_local_synchronization=True))


def _own_box(tensor: Any) -> Box:
    """Return the part of a `DTensor`'s matrices that this rank holds, of those of which it holds a part."""
    if torch.__version__ < "2.10":
        refuse_unequal_shards(tensor)
    (chunk,) = tensor.__create_chunk_list__()
    # Other axes may cut a leading dim; their ranks take no part in the exchange.
    leading = len(chunk.sizes) - 2
    return Box((0,) * leading + tuple(chunk.offsets[leading:]), tuple(chunk.sizes))


def _divide(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the indexes that each rank owns, the costly first, with about equal sums of costs."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        rank = loads.index(min(loads))
        owned[rank].append(index)
        loads[rank] += costs[index]
    return owned


def _cost(shape: tuple[int, ...]) -> int:
    """Return what the iteration costs, in multiplications up to a factor."""
    *batch, rows, columns = shape
    return math.prod(batch) * min(rows, columns) ** 2 * max(rows, columns)


def _flat(part: Tensor | None) -> Tensor:
    assert part is not None
    return part.reshape(-1)
