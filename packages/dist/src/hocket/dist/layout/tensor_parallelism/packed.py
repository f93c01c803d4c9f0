"""The exchange after a layer that stores several matrices as one, such as queries, keys and values."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.dist.layout.sequence.exchange import refuse_second_derivatives


class PackedOutput:
    """The exchange after which each rank has its share of every one of several matrices' outputs.

    A weight that stores several matrices is cut into consecutive rows, as every other one, so that it is
    stored and saved alike. Of the outputs each rank then has a consecutive part, such as all queries and half
    of the keys. The outputs fall into equal cells, one for each matrix and rank. A cell that belongs to
    another rank is sent to it; the others are copied to their place.

    Args:
        mesh: The axis `tp`.
        num_parts: The number of matrices.
    """

    def __init__(self, mesh: DeviceMesh, num_parts: int) -> None:
        self._group = mesh.get_group()
        self._num_parts = num_parts
        rank, degree = mesh.get_local_rank(), mesh.size()
        # Rank r computes the cells num_parts * r + 0, 1, …; cell c is the share of rank c % degree of the
        # matrix c // degree. Both sides list the cells that one sends to the other in ascending order.
        computed = list(range(num_parts * rank, num_parts * (rank + 1)))
        self._kept = [(place, cell // degree) for place, cell in enumerate(computed) if cell % degree == rank]
        others = [other for other in range(degree) if other != rank]
        leaving = [[p for p, cell in enumerate(computed) if cell % degree == other] for other in others]
        coming = [
            [part for part in range(num_parts) if (part * degree + rank) // num_parts == other]
            for other in others
        ]
        self._leaving = [place for places in leaving for place in places]
        self._coming = [part for parts in coming for part in parts]
        sent = dict(zip(others, map(len, leaving), strict=True))
        received = dict(zip(others, map(len, coming), strict=True))
        self._sent = [sent.get(other, 0) for other in range(degree)]
        self._received = [received.get(other, 0) for other in range(degree)]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of each matrix's output, side by side."""
        result: torch.Tensor = _Exchange.apply(output, self)
        return result

    def forth(self, output: torch.Tensor) -> torch.Tensor:
        """Return the cells of this rank, of those that the ranks have computed. Collective."""
        kept = self._kept
        return self._move(output, self._leaving, self._sent, self._coming, self._received, kept)

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the cells that this rank has computed, of those that the ranks have. Collective."""
        kept = [(part, place) for place, part in self._kept]
        return self._move(gradient, self._coming, self._received, self._leaving, self._sent, kept)

    def _move(
        self,
        values: torch.Tensor,
        leaving: list[int],
        sent: list[int],
        coming: list[int],
        received: list[int],
        kept: list[tuple[int, int]],
    ) -> torch.Tensor:
        cells = values.reshape(*values.shape[:-1], self._num_parts, -1).unbind(-2)
        result = torch.empty_like(values, memory_format=torch.contiguous_format)
        places = result.view(*values.shape[:-1], self._num_parts, -1).unbind(-2)
        outgoing = values.new_empty((len(leaving), *cells[0].shape))
        for row, index in enumerate(leaving):
            outgoing[row].copy_(cells[index])
        incoming = values.new_empty((len(coming), *cells[0].shape))
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self._group)
        for source, index in kept:
            places[index].copy_(cells[source])
        for row, index in enumerate(coming):
            places[index].copy_(incoming[row])
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, packed: PackedOutput) -> torch.Tensor:
        ctx.packed = packed
        return packed.forth(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivatives()
        return ctx.packed.back(gradient), None
