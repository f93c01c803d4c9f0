"""What a stack of experts saves for backward, counted on the meta device with an even spread of rows.

How many rows an expert gets depends on values, which the meta device does not have. Here each expert gets as
many as the others: the numbers of experts are real tensors, and all else stays on the meta device.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.dist.memory.meta_operators import KnownIndices


@dataclass(frozen=True, kw_only=True, slots=True)
class StackPass:
    """What the forward pass of a stack saves.

    Attributes:
        saved: Bytes, without the rows and weights that the stack is called with.
        saves_rows: Whether it also saves the rows themselves.
        shape: The shape of its results.
        dtype: Their dtype.
    """

    saved: int
    saves_rows: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class EvenRows:
    """The forward pass of stacks of experts in a model on the meta device, with an even spread of rows.

    Each stack is measured once for each of its shapes, since many blocks have equal ones.

    Args:
        is_exchanged: Whether rows travel to the ranks of their experts, as with `ep`. A rank gets as many
            rows as it sends, for all of its experts together, and so do the stacks here with all of theirs.

    Attributes:
        sent: Bytes of the rows that travelled to experts so far.
        flops: Floating-point operations of the experts so far.
    """

    def __init__(self, *, is_exchanged: bool) -> None:
        self._is_exchanged = is_exchanged
        self._measured: dict[Any, StackPass] = {}
        self.sent = self.flops = 0

    def attach(self, stack: nn.Module, around: Callable[[], Any]) -> None:
        """Replace the forward pass of a stack.

        Args:
            stack: On the meta device, with `num_experts` and `forward(rows, experts, weights)`.
            around: Makes a context for each measurement.
        """
        forward = stack.forward
        called = inspect.signature(forward)
        try:
            called.bind(None, None, None)
        except TypeError:
            return  # called in another way, and not with the numbers of experts

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            rows, experts, weights = called.bind(*args, **kwargs).args
            sizes = [(tuple(one.shape), one.dtype) for one in stack.parameters()]
            key = (type(stack), tuple(sizes), rows.shape, rows.dtype, experts.shape, weights.dtype)
            if key not in self._measured:
                with around():
                    self._measured[key] = self._measure(stack, forward, rows, experts, weights)
            found = self._measured[key]
            chosen = experts.shape[-1] * len(rows)
            self.sent += chosen * rows.shape[-1] * rows.element_size()
            # Each row is multiplied by all matrices of an expert.
            self.flops += 2 * chosen * sum(one[0].numel() for one in stack.parameters() if one.ndim == 3)
            result: torch.Tensor = _Saving.apply(rows, weights, found)
            return result

        stack.forward = run

    def _measure(
        self,
        stack: nn.Module,
        forward: Callable[..., torch.Tensor],
        rows: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> StackPass:
        rows = torch.empty_like(rows).requires_grad_()
        weights = torch.empty_like(weights).requires_grad_()
        seen = {one.untyped_storage()._cdata for one in (*stack.parameters(), *stack.buffers(), weights)}
        kept: list[torch.Tensor] = []  # alive, so that no storage gets the address of another one
        saves_rows = False

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saves_rows
            storage = tensor.untyped_storage()
            if storage._cdata == rows.untyped_storage()._cdata:
                saves_rows = True
            elif storage._cdata not in seen:
                seen.add(storage._cdata)
                kept.append(tensor)
            return tensor

        number = int(stack.num_experts)  # type: ignore[arg-type]
        call = _exchanged if self._is_exchanged else _direct
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), KnownIndices():
            result = call(forward, rows, weights, number, tuple(experts.shape))
        return StackPass(
            saved=sum(one.untyped_storage().nbytes() for one in kept),
            saves_rows=saves_rows,
            shape=tuple(result.shape),
            dtype=result.dtype,
        )


def _direct(
    forward: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Call a stack that has all experts."""
    return forward(rows, (torch.arange(math.prod(shape), device="cpu") % num_experts).view(shape), weights)


def _exchanged(
    forward: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Call a stack as `hocket.dist.layout.experts` does where ranks share it, without the exchange."""
    num_rows, num_choices = shape
    order = torch.arange(num_rows * num_choices, device="cpu")
    arrived = _Sent.apply(rows[order // num_choices].contiguous())
    local = (order % num_experts)[:, None]
    results = forward(arrived, local, torch.ones_like(local, dtype=weights.dtype, device="meta"))
    back: torch.Tensor = _Sent.apply(results.contiguous())
    mixed = back[order.clone()] * weights.reshape(-1, 1)
    return mixed.view(num_rows, num_choices, mixed.shape[1]).sum(1).to(rows.dtype)


class _Sent(torch.autograd.Function):
    """Rows that have travelled, in memory of their own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


class _Saving(torch.autograd.Function):
    """The results of a stack, without values, for which as much is saved as the stack saves."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, found: StackPass) -> torch.Tensor:
        saved = torch.empty(found.saved, dtype=torch.uint8, device=rows.device)
        ctx.save_for_backward(saved, weights, *([rows] if found.saves_rows else []))
        return torch.empty(found.shape, dtype=found.dtype, device=rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("an estimate has no backward pass")
