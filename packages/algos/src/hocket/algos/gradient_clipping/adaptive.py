"""Adaptive gradient clipping, unit by unit, exact on sharded parameters too."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hocket.algos.errors import IncompatibleError

_LEAST_WEIGHT_NORM = 1e-3  # so that units that start at nought can move
_LEAST_GRADIENT_NORM = 1e-6

Groups = tuple[dist.ProcessGroup, ...]


def clip_adaptively(parameters: Iterable[torch.Tensor], threshold: float) -> None:
    """Scale each unit's gradient to at most `threshold` times the norm of the unit's weights, in place.

    A unit of a parameter with several dims is one index of its first, which a shard along that dim has whole.
    The one unit of a vector is cut by sharding: its squares are summed over the ranks, all vectors at once.

    Args:
        parameters: Plain, replicated, or sharded along their first dim; without a gradient, passed over.
        threshold: λ of the paper.

    Raises:
        IncompatibleError: A parameter is laid out otherwise; nothing has been clipped then.
    """
    cut: dict[Groups, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        groups = _groups(parameter)
        pair = (_local(parameter.detach()), _local(parameter.grad))
        if groups and parameter.ndim <= 1:
            cut[groups].append(pair)
        else:
            whole.append(pair)
    for weight, gradient in whole:
        _scale(gradient, _norms(weight), _norms(gradient), threshold)
    for groups, pairs in cut.items():
        squares = torch.stack([_norms(tensor).square() for pair in pairs for tensor in pair])
        for group in groups:
            dist.all_reduce(squares, group=group)
        norms = squares.sqrt().unbind()
        for index, (_, gradient) in enumerate(pairs):
            _scale(gradient, norms[2 * index], norms[2 * index + 1], threshold)


def _scale(gradient: torch.Tensor, weight_norm: torch.Tensor, norm: torch.Tensor, threshold: float) -> None:
    most = weight_norm.clamp(min=_LEAST_WEIGHT_NORM) * threshold
    factor = torch.where(norm > most, most / norm.clamp(min=_LEAST_GRADIENT_NORM), torch.ones_like(norm))
    gradient.mul_(factor)


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of each unit, shaped to multiply the tensor with."""
    if tensor.ndim <= 1:
        norms: torch.Tensor = torch.linalg.vector_norm(tensor)
    else:
        norms = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
    return norms


def _groups(parameter: torch.Tensor) -> Groups:
    """Return the process groups over which a parameter is cut; () where each rank has it whole."""
    if not isinstance(parameter, DTensor):
        return ()
    groups = []
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and placement.dim == 0:
            groups.append(parameter.device_mesh.get_group(axis))
        elif not placement.is_replicate():
            raise IncompatibleError(
                f"Adaptive clipping needs units that are whole on a rank, but a parameter of shape "
                f"{tuple(parameter.shape)} is laid out as {placement}. Clip by 'norm' instead."
            )
    return tuple(groups)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
