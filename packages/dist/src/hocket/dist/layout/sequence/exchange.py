"""Exchanges of activations between ranks, through which gradients flow back."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hocket.dist.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The ranks that share a sequence.

    Attributes:
        name: The axis of the mesh.
        group: Its process group.
        rank: The place of this process in the group.
        size: The number of ranks.
        is_averaged: Whether the gradients of parameters are averaged over these ranks, and not added up.
        is_balanced: Whether a rank has a part of the head of a sequence and one of its tail, so that causal
            masks give all ranks equal work, and not one part.
    """

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int
    is_averaged: bool = False
    is_balanced: bool = False

    @property
    def num_parts(self) -> int:
        """The number of equal parts into which a sequence is cut."""
        return 2 * self.size if self.is_balanced else self.size


def make_axis(
    ranks: torch.Tensor, dim: int, *, name: str, rank: int, timeout_s: float, is_balanced: bool = False
) -> Axis:
    """Return an axis of a mesh over which sequences are cut and gradients averaged. Collective.

    Args:
        ranks: The ranks of the mesh.
        dim: The axis of `ranks`.
        name: Its name.
        rank: The rank of this process.
        timeout_s: Seconds that a collective within the axis may take.
        is_balanced: Whether a rank has a part of the head of a sequence and one of its tail.
    """
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    made: Any = dist.new_subgroups_by_enumeration(rows, timeout=timedelta(seconds=timeout_s))
    (row,) = (row for row in rows if rank in row)
    return Axis(
        name=name,
        group=made[0],
        rank=row.index(rank),
        size=len(row),
        is_averaged=True,
        is_balanced=is_balanced,
    )


def cut(whole: torch.Tensor, axis: Axis, *, dim: int = 1) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks of the axis have.

    Backward gathers the gradients of all parts. Where gradients are averaged over the axis it divides by the
    number of ranks, which `gather` has multiplied with before, so that parameters that act on parts have the
    gradient of the whole after the average, as those that act on the whole.
    """
    part: torch.Tensor = _Cut.apply(whole, axis, dim)
    return part


def part_of(whole: torch.Tensor, axis: Axis, rank: int, *, dim: int = 1) -> torch.Tensor:
    """Return a copy of the part that a rank of the axis has of a tensor, without gradients."""
    length = whole.shape[dim] // axis.num_parts
    head = whole.narrow(dim, rank * length, length)
    if not axis.is_balanced:
        return head.clone(memory_format=torch.contiguous_format)
    tail = whole.narrow(dim, (axis.num_parts - 1 - rank) * length, length)
    return torch.cat([head, tail], dim=dim)


def gather(part: torch.Tensor, axis: Axis, *, dim: int = 1) -> torch.Tensor:
    """Return the tensor of which each rank has a part; backward takes this rank's part of the gradient."""
    whole: torch.Tensor = _Gather.apply(part, axis, dim)
    return whole


def exchange(
    rows: torch.Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to the ranks of a group, and return the rows that they send; backward sends gradients back.

    Args:
        rows: Contiguous; those for the first rank come first.
        sent: The number of rows for each rank; None for equal numbers.
        received: The number of rows from each rank; None for equal numbers.
        group: The ranks.
    """
    result: torch.Tensor = _Exchange.apply(rows, sent, received, group)
    return result


def refuse_second_derivatives() -> None:
    """Refuse, in a backward pass, to record it for another one, from which exchanges would be missing.

    Raises:
        ModelError: It is recorded.
    """
    # A compiler calls it with gradients enabled, and refuses second derivatives itself.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise ModelError(
            "the backward pass has `create_graph=True`, as a gradient penalty needs it, and second "
            "derivatives through the exchanges of `tp`, `cp` and `ep` are not computed. Leave these axes out "
            "of `parallelism_config`, or `create_graph`"
        )


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return part_of(whole, axis, axis.rank, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_second_derivatives()
        whole = _whole(gradient, ctx.axis, ctx.dim)
        return whole / ctx.axis.size if ctx.axis.is_averaged else whole, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(part, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_second_derivatives()
        part = part_of(gradient, ctx.axis, ctx.axis.rank, dim=ctx.dim)
        return part * ctx.axis.size if ctx.axis.is_averaged else part, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        refuse_second_derivatives()
        return _all_to_all(gradient.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def _whole(part: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    part = part.contiguous()
    parts = part.new_empty((axis.size, *part.shape))
    dist.all_gather(list(parts.unbind()), part, group=axis.group)
    if axis.is_balanced:
        heads, tails = parts.chunk(2, dim=dim + 1)
        parts = torch.cat([heads, tails.flip(0)])
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # parts of one position make a view


def _all_to_all(
    rows: torch.Tensor,
    sent: Sequence[int] | None,
    received: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    count = len(rows) if received is None else sum(received)
    result = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(
        result,
        rows,
        None if received is None else list(received),
        None if sent is None else list(sent),
        group=group,
    )
    return result
