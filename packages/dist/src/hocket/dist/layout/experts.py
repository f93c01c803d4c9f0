"""Expert parallelism: stacks of experts shared by ranks, to which tokens travel and back.

A stack is a module with the attribute `num_experts`, whose parameters have the experts in their first dim,
and with `forward(rows, experts, weights)`: rows `(N, D)`, the experts that each is for `(N, K)` and how much
each of them counts `(N, K)`. The mixtures of transformers and of `hocket.recipes` are of that kind. Every row
goes to its experts, however many they get.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.stateless import _reparametrize_module

from hocket.dist.config.axes import DP_SHARD, EP, TP
from hocket.dist.errors import ModelError
from hocket.dist.layout.sequence.exchange import exchange
from hocket.dist.ranks.mesh import MeshShape, build_expert_mesh


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


class ExpertRanks:
    """The ranks that share the experts of a model, among those that share its parameters.

    Its making is collective if it needs a mesh of its own.

    Args:
        shape: The sizes of the axes of the parameters' mesh.
        degree: The ranks that share the experts; 1 if none do.
        device: The device of training.
        timeout_s: Seconds that a collective within an axis may take.
        place: The index of the parameters' mesh among meshes of one shape, as of pipeline stages, and their
            number.
    """

    def __init__(
        self,
        shape: MeshShape,
        degree: int,
        *,
        device: torch.device,
        timeout_s: float,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self._shape, self._degree = shape, degree
        self._num_stacks = 0
        self._cut: tuple[str, ...] = ()
        self._mesh: DeviceMesh | None = None
        if 1 < degree < shape.parameter_axes[DP_SHARD]:
            self._mesh = build_expert_mesh(shape, degree, device=device, timeout_s=timeout_s, place=place)

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose experts the ranks cannot share. No communication.

        Args:
            model: The whole model, plain: a stage of it may have no experts.

        Raises:
            ModelError: As `check_experts`.
        """
        if self._degree > 1:
            self._num_stacks = len(check_experts(model, self._degree))

    def cut(self, model: nn.Module, mesh: DeviceMesh) -> tuple[Sequence[nn.Module], Mapping[str, DeviceMesh]]:
        """Give this rank its share of the experts of a model or a stage, in place. No communication.

        Args:
            model: With the same values on all ranks of the mesh, or on the meta device; experts are plain.
            mesh: The mesh of the parameters.

        Returns:
            The stacks that `fully_shard` has to leave as they are, and the meshes, by name, on which it has
            to shard the others.
        """
        stacks = {} if self._degree == 1 else find_experts(model)
        self._cut = tuple(f"{name}." if name else "" for name in stacks)
        if self._mesh is None:
            cut_experts(stacks, mesh, over=DP_SHARD)
            return tuple(stacks.values()), {}
        cut_experts(stacks, self._mesh, over=EP)
        return (), dict.fromkeys(stacks, self._mesh[self._shape.sharding_axes])

    def is_cut(self, name: str) -> bool:
        """Return whether a parameter is of experts that `cut` has given to ranks."""
        return name.startswith(self._cut)

    def describe(self) -> str:
        """Return the number of stacks of the whole model in words; empty if no ranks share experts."""
        if not self._num_stacks:
            return ""
        return f"; {self._num_stacks} stacks of experts shared by {self._degree} ranks"

    def close(self) -> None:
        """Let the mesh go, which keeps the sockets of its groups open."""
        self._mesh = None


def cut_experts(stacks: Mapping[str, nn.Module], mesh: DeviceMesh, *, over: str) -> None:
    """Give each rank of an axis its share of the experts, in place. No communication.

    Parameters become DTensors, cut along the experts. Over `dp_shard` they are then complete: equal over
    `dp_replicate` and `tp`, and averaged here. Over `ep` they are on `ep` and `tp` alone, and `fully_shard`
    has to cut each share over `dp_shard`, and to average it over the axes before `ep`.

    Args:
        stacks: Stacks of experts that `check_experts` takes, with the same values on all ranks, or on the
            meta device.
        mesh: All axes of the experts, `over` among them.
        over: The axis whose ranks share the experts.
    """
    names = mesh.mesh_dim_names or ()
    group = mesh.get_group(over)
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
