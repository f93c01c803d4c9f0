"""Tensors that may be sharded over ranks: the part of this rank, the whole, and norms of the whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hocket.trainer.errors import TrainerError


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, sharing its memory; any other value as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a plain tensor in place of a sharded one, or of the norm of one; collective for those.

    Raises:
        TrainerError: If torch 2.9 may put the shards together in a wrong order.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if torch.__version__ < "2.10":
        refuse_unequal_shards(tensor)
    whole: Tensor = tensor.full_tensor()
    return whole


def refuse_unequal_shards(tensor: Any) -> None:
    """Refuse a dim that two dims of the mesh cut into unequal shards, which torch 2.9 gathers wrongly."""
    cuts: dict[int, list[int]] = defaultdict(list)
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_shard():
            cuts[placement.dim].append(size)
    for dim, sizes in cuts.items():
        if len(sizes) > 1 and tensor.shape[dim] % math.prod(sizes):
            raise TrainerError(
                f"a tensor {tuple(tensor.shape)} is cut over {' x '.join(map(str, sizes))} ranks along dim "
                f"{dim}, into unequal shards, and torch {torch.__version__} may return wrong values for "
                "the whole of it. Install torch 2.10 or newer, or make the dim a multiple of "
                f"{math.prod(sizes)}"
            )


def tensor_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each tensor as a float32 scalar on its device.

    Collective where tensors are sharded `DTensor`s: one all-reduce for each dim of each mesh. Every rank must
    pass the same names in the same order. Does not wait for the device.

    Args:
        tensors: By name; real or complex, dense or sparse.

    Returns:
        By name, scalars `()`; for sharded tensors the norm of the whole.
    """
    return {name: square.sqrt() for name, square in _squares(tensors).items()}


def global_norm(norms: Mapping[str, Tensor]) -> Tensor:
    """Return the 2-norm of all the tensors together, `()` float32; zero where there are none."""
    if not norms:
        return torch.zeros((), device="cpu")
    first = next(iter(norms.values()))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first.device) for norm in norms.values()]))
    return total


def dot_products(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the scalar product of each pair of equally laid out tensors. Collective as `tensor_norms`."""
    local = {name: (_dense(one).float() * _dense(two).float()).sum() for name, (one, two) in pairs.items()}
    return _sum_over_shards(local, {name: one for name, (one, _) in pairs.items()})


def _squares(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    local: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    by_kind: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        numbers[name] = part = _numbers(local_part(tensor.detach()))
        by_kind[part.device, part.dtype].append(name)
    for (_, dtype), names in by_kind.items():
        parts = [numbers[name] for name in names]
        norms = torch._foreach_norm(parts, 2, dtype=dtype if dtype == torch.float64 else torch.float32)
        local |= {name: norm.square().float() for name, norm in zip(names, norms, strict=True)}
    return _sum_over_shards({name: local[name] for name in tensors}, tensors)


def _numbers(tensor: Tensor) -> Tensor:
    """Return the real numbers whose squares add up to the square of a tensor's norm."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()  # entries that occur several times are added up first
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sum_over_shards(local: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add up the parts of each tensor over the mesh dims along which it is sharded."""
    by_group: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        mesh: Any = getattr(tensor, "device_mesh", None)
        for dim, placement in enumerate(getattr(tensor, "placements", ())):
            if not placement.is_replicate():
                by_group[mesh.get_group(dim)].append(name)
    for group, names in by_group.items():
        vector = torch.stack([local[name] for name in names])
        torch.distributed.all_reduce(vector, group=group)
        local |= dict(zip(names, vector.unbind(), strict=True))
    return local


def _dense(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor, all of them, in the order of a dense one."""
    local = local_part(tensor.detach())
    return _numbers(local.to_dense() if local.is_sparse else local)
