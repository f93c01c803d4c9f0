"""The joint norm of all gradients, sharded or not, and clipping by it."""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hocket.dist.errors import ModelError

_DOUBLE = (torch.float64, torch.complex128)


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    over: dist.ProcessGroup | None = None,
    uncounted: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`.

    Collective where gradients are sharded: one all-reduce of a scalar for each mesh. Does not wait for the
    device. Unlike torch's function of the same name, which returns each rank's partial norm for sharded
    gradients, this returns the whole norm.

    Args:
        parameters: Those without a gradient are skipped. Gradients may be of several dtypes, complex, or
            sparse.
        max_norm: At least 0; `inf` measures and does not clip.
        over: Ranks with other parameters of the same model, as stages of a pipeline have, whose gradients
            count in the norm; some of them may have no gradients.
        uncounted: Parameters that other ranks of `over` count. Their gradients are scaled alike.

    Returns:
        The norm before clipping: a plain float32 scalar (float64 for gradients in double precision), equal on
        all ranks.

    Raises:
        ModelError: A gradient has a layout other than replicated or sharded.
    """
    parameters = list(parameters)
    found = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in found if parameter.grad is not None]
    if not gradients and (over is None or not parameters):
        return torch.zeros((), device="cpu")
    left_out = {id(parameter) for parameter in uncounted}
    counted = [gradients[index] for index, one in enumerate(found) if id(one) not in left_out]
    squares = [
        _sum_over_ranks(_square_norm(local), groups) for groups, local in _by_groups(counted).items()
    ] or [torch.zeros((), device=_local(parameters[0]).device)]
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum()
    total = (total if over is None else _sum_over_ranks(total, (over,))).sqrt()
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, _), local in _by_kind([_local(gradient) for gradient in gradients]).items():
        factor = coefficient.to(device)
        if local[0].is_complex():
            for gradient in local:  # the fused kernel refuses conjugated tensors
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(local, factor)
    return total


def _by_groups(gradients: list[torch.Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    """Return local parts by the process groups over which to sum their norms; () for whole gradients."""
    gradients_by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups: list[dist.ProcessGroup] = []
        if isinstance(gradient, DTensor):
            for axis, placement in enumerate(gradient.placements):
                # By the attribute: the strided shard of `fully_shard` over tensor parallelism is no `Shard`.
                if hasattr(placement, "dim"):
                    groups.append(gradient.device_mesh.get_group(axis))
                elif not placement.is_replicate():
                    raise ModelError(
                        f"a gradient of shape {tuple(gradient.shape)} is laid out as {placement}, expected "
                        "Shard or Replicate. Redistribute it before clipping"
                    )
        gradients_by_groups[tuple(groups)].append(_local(gradient))
    return gradients_by_groups


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_kind(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    return kinds


def _square_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return Σ |x|² as a scalar in float32, or in float64 if a tensor is in double precision."""
    device = tensors[0].device
    dtype = torch.float64 if any(tensor.dtype in _DOUBLE for tensor in tensors) else torch.float32
    squares = [
        torch.stack(_norms(kind, dtype)).square().sum().to(device) for kind in _by_kind(tensors).values()
    ]
    return torch.stack(squares).sum()


def _norms(kind: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norms of tensors of one device and dtype, as scalars of a real dtype."""
    if kind[0].is_complex():
        kind = [torch.view_as_real(_numbers(tensor).resolve_conj()) for tensor in kind]
    try:
        return list(torch._foreach_norm(kind, 2, dtype=dtype))
    except RuntimeError:  # of sparse tensors; tried first, since a look at each tensor takes time
        if not any(tensor.is_sparse for tensor in kind):
            raise
        return list(torch._foreach_norm([_numbers(tensor) for tensor in kind], 2, dtype=dtype))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, or the values of a sparse one, of which those of one place are added up."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _sum_over_ranks(square: torch.Tensor, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    for group in groups:
        # With host offload the gradients are on the CPU and the group may reduce on its device only.
        devices = [torch.device(kind) for kind in group._device_types]
        if devices and square.device.type not in {device.type for device in devices}:
            square = square.to(devices[0])
        dist.all_reduce(square, group=group)
    return square
