"""Expert parallelism: stacks of experts shared by ranks, to which tokens travel and back.

A stack is a module with the attribute `num_experts`, whose parameters have the experts in their first dim,
and with `forward(rows, experts, weights)`: rows `(N, D)`, the experts that each is for `(N, K)` and how much
each of them counts `(N, K)`. The mixtures of transformers and of `hocket.recipes` are of that kind. Every row
goes to its experts, however many they get.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.stateless import _reparametrize_module

from hocket.dist.config.parallelism import EP, TP
from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.exchange import exchange


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the stacks of experts of a model by name; of modules within each other the innermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        parameters = list(module.parameters())
        is_stacked = all(one.ndim >= 2 and len(one) == number for one in parameters)
        # A router has one matrix, with a row for each expert.
        if isinstance(number, int) and is_stacked and any(one.ndim == 3 for one in parameters):
            found[name] = module
    # A block with its router and its experts may look like a stack, too.
    return {
        name: module
        for name, module in found.items()
        if not any(other.startswith(f"{name}." if name else "") for other in found if other != name)
    }


def check_experts(model: nn.Module, degree: int) -> dict[str, nn.Module]:
    """Return the stacks of experts of a model, which this many ranks can share.

    Raises:
        ModelError: There are none, or fewer experts than ranks, the ranks cannot share them evenly, or they
            are called in another way than `forward(rows, experts, weights)`.
    """
    stacks = find_experts(model)
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} has no experts for the {degree} ranks of `{EP}`: no module with "
            f"`num_experts` and parameters that have the experts in their first dim. Leave `{EP}` out"
        )
    for name, module in stacks.items():
        number = int(module.num_experts)  # type: ignore[arg-type]
        if number % degree:
            common = math.gcd(number, degree)  # a divisor of the ranks, too
            what = "fewer than" if number < degree else "which cannot be shared evenly by"
            advice = f"Use `{EP}` {common}" if common > 1 else f"Leave `{EP}` out"
            raise ModelError(
                f"`{name}` has {number} experts, {what} the {degree} ranks of `{EP}`. {advice}, or choose a "
                f"multiple of {degree} experts"
            )
        called = inspect.signature(module.forward)
        try:
            called.bind(None, None, None)
        except TypeError:
            raise ModelError(
                f"`{name}` has experts, and `forward{called}`, expected `forward(rows, experts, weights)`, "
                f"by which ranks send rows to experts. Leave `{EP}` out"
            ) from None
    return stacks


def cut_experts(model: nn.Module, mesh: DeviceMesh, *, over: str) -> dict[str, nn.Module]:
    """Give each rank of an axis its share of the experts, in place. No communication.

    Parameters become DTensors, cut along the experts. Over `dp_shard` they are then complete: equal over
    `dp_replicate` and `tp`, and averaged here. Over `ep` they are on `ep` and `tp` alone, and `fully_shard`
    has to cut each share over `dp_shard`, and to average it over the axes before `ep`.

    Args:
        model: With the same values on all ranks, or on the meta device; experts are plain.
        mesh: All axes of the experts, `over` among them.
        over: The axis whose ranks share the experts.

    Returns:
        The stacks by name.

    Raises:
        ModelError: As `check_experts`.
    """
    names = mesh.mesh_dim_names or ()
    group = mesh.get_group(over)
    stacks = check_experts(model, group.size())
    if over == EP:
        names = names[names.index(EP) :]
        copies, num_ranks = list[dist.ProcessGroup](), group.size()
        mesh = mesh[names]
    else:
        sizes = {name: mesh[name].size() for name in names if name != TP}
        copies = [mesh.get_group(name) for name, size in sizes.items() if name != over and size > 1]
        num_ranks = math.prod(sizes.values())
    placements: list[Placement] = [Shard(0) if name == over else Replicate() for name in names]
    for module in stacks.values():
        for owner in module.modules():
            for key, one in list(owner.named_parameters(recurse=False)):
                placed = distribute_tensor(one, mesh, placements, src_data_rank=None)
                owner.register_parameter(key, nn.Parameter(placed, requires_grad=one.requires_grad))
        setattr(module, "num_experts", int(module.num_experts) // group.size())  # type: ignore[arg-type]  # noqa: B010
        module.forward = _Dispatch(module, module.forward, group, copies, num_ranks)
    return stacks


class _Dispatch:
    """The forward pass of a stack of which each rank has some experts.

    Args:
        module: The stack.
        forward: Its own forward pass, on the experts that it has.
        group: The ranks that share the experts.
        copies: The groups of ranks with the same experts, over which nothing else averages gradients.
        num_ranks: The divisor of gradients that makes their sum the average over all ranks with data of their
            own or parts of sequences, as `fully_shard` averages those of other parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., torch.Tensor],
        group: dist.ProcessGroup,
        copies: list[dist.ProcessGroup],
        num_ranks: int,
    ) -> None:
        self._module, self._forward, self._group = module, forward, group
        self._copies, self._num_ranks = copies, num_ranks

    def __call__(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send rows to the ranks that have their experts, compute there, and send the results back."""
        size, own = self._group.size(), int(self._module.num_experts)  # type: ignore[arg-type]
        num_rows, num_choices = experts.shape
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sent = torch.bincount(flat // own, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        to, come = sent.tolist(), received.tolist()
        arrived = exchange(rows[order // num_choices].contiguous(), to, come, self._group)
        chosen = torch.empty(sum(come), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(chosen, flat[order], come, to, group=self._group)
        local = (chosen % own)[:, None]
        values = {name: self._own(one, arrived.dtype) for name, one in self._module.named_parameters()}
        with _reparametrize_module(self._module, values):
            results = self._forward(arrived, local, torch.ones_like(local, dtype=weights.dtype))
        results = _Kept.apply(results, arrived, *values.values())
        back = exchange(results.contiguous(), come, to, self._group)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        mixed = back[places] * weights.reshape(-1, 1)
        return mixed.view(num_rows, num_choices, mixed.shape[1]).sum(1).to(rows.dtype)

    def _own(self, parameter: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of this rank's experts; their gradients are averaged as all others are."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        averaged: torch.Tensor = _Averaged.apply(local, self._copies, self._num_ranks)
        return averaged.to(dtype)


class _Kept(torch.autograd.Function):
    """The same results, of which backward reaches the rows and the experts also if no row went to them.

    Otherwise this rank would not take part in the exchange of gradients, and would have none of experts for
    which one process has zeros.
    """

    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, *used: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(one.shape, one.dtype, one.device) for one in used]
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes
        ]
        return gradient, *zeros


class _Averaged(torch.autograd.Function):
    """The same tensor, whose gradient is averaged over all ranks that have data of their own.

    The ranks that share the experts have sent their parts with the rows; those of copies are added up.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, copies: list[dist.ProcessGroup], num_ranks: int
    ) -> torch.Tensor:
        ctx.copies, ctx.num_ranks = copies, num_ranks
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = (gradient / ctx.num_ranks).contiguous()
        for group in ctx.copies:
            dist.all_reduce(total, group=group)
        return total, None, None
