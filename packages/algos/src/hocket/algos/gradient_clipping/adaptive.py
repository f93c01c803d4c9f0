"""Adaptive gradient clipping, unit by unit, exact on sharded parameters too."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hocket.algos.errors import IncompatibleError
from hocket.trainer.ranks.sharded_tensors import local_part

_LEAST_WEIGHT_NORM = 1e-3  # so that units that start at zero can move
_LEAST_GRADIENT_NORM = 1e-6

Groups = tuple[dist.ProcessGroup, ...]


def clip_adaptively(parameters: Iterable[torch.Tensor], threshold: float) -> None:
    """Scale each unit's gradient to at most `threshold` times the norm of the unit's weights, in place.

    A unit of a parameter with several dims is one index of its first dim, which a shard along that dim holds
    whole. A vector is one unit, which sharding cuts: the squares of all vectors are summed over the ranks, in
    one all-reduce per group.

    Args:
        parameters: Plain, replicated, or sharded along their first dim; those without a gradient are skipped.
        threshold: λ of the paper.

    Raises:
        IncompatibleError: A parameter is laid out otherwise, or has a sparse gradient. Nothing is clipped.
    """
    sharded_pairs: dict[Groups, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    gradients: list[torch.Tensor] = []
    weight_norms: list[torch.Tensor] = []
    gradient_norms: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise IncompatibleError(
                f"adaptive clipping needs dense gradients, but a parameter of shape {tuple(parameter.shape)} "
                "has a sparse one. Build its embedding with `sparse=False`, or clip by 'norm'"
            )
        groups = _groups(parameter)
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad.detach())
        if groups and parameter.ndim <= 1:
            sharded_pairs[groups].append((weight, gradient))
        else:
            gradients.append(gradient)
            weight_norms.append(_norms(weight))
            gradient_norms.append(_norms(gradient))
    for groups, pairs in sharded_pairs.items():
        squares = torch.stack([_norms(tensor).square() for pair in pairs for tensor in pair])
        for group in groups:
            dist.all_reduce(squares, group=group)
        norms = squares.sqrt().unbind()
        gradients += [gradient for _, gradient in pairs]
        weight_norms += norms[::2]
        gradient_norms += norms[1::2]
    if gradients:
        _scale(gradients, weight_norms, gradient_norms, threshold)


def _scale(
    gradients: list[torch.Tensor],
    weight_norms: list[torch.Tensor],
    gradient_norms: list[torch.Tensor],
    threshold: float,
) -> None:
    """Multiply gradients by min(1, threshold * weight norm / gradient norm), in a few fused kernels."""
    factors = list(torch._foreach_clamp_min(weight_norms, _LEAST_WEIGHT_NORM))
    torch._foreach_mul_(factors, threshold)
    torch._foreach_div_(factors, list(torch._foreach_clamp_min(gradient_norms, _LEAST_GRADIENT_NORM)))
    torch._foreach_clamp_max_(factors, 1.0)
    torch._foreach_mul_(gradients, factors)


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of each unit, shaped to multiply the tensor with."""
    if tensor.ndim <= 1:
        norms: torch.Tensor = torch.linalg.vector_norm(tensor)
    else:
        norms = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
    return norms


def _groups(parameter: torch.Tensor) -> Groups:
    """Return the process groups over which a parameter is cut; () if each rank has it whole."""
    if not isinstance(parameter, DTensor):
        return ()
    groups = []
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and placement.dim == 0:
            groups.append(parameter.device_mesh.get_group(axis))
        elif not placement.is_replicate():
            raise IncompatibleError(
                f"adaptive clipping needs units that are whole on a rank, but a parameter of shape "
                f"{tuple(parameter.shape)} is laid out as {placement}. Clip by 'norm' instead"
            )
    return tuple(groups)
