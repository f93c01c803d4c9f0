"""Ranks and collectives, as `composer.utils.dist`, over `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset, DistributedSampler

from hocket.compat.composer.devices import as_torch_device
from hocket.dist import World, join, read_world
from hocket.trainer.process.devices import choose_device

_REDUCTIONS = {
    "SUM": torch_dist.ReduceOp.SUM,
    "PRODUCT": torch_dist.ReduceOp.PRODUCT,
    "MIN": torch_dist.ReduceOp.MIN,
    "MAX": torch_dist.ReduceOp.MAX,
}


def _world() -> World:
    return read_world()


def is_available() -> bool:
    """Return whether torch was built with its distributed package."""
    return torch_dist.is_available()


def is_initialized() -> bool:
    """Return whether there is a process group."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def initialize_dist(device: str | torch.device | None = None, timeout: float = 300.0) -> None:
    """Make the process group of a job of several ranks, unless there is one.

    Collective. The group lasts as long as the process.

    Args:
        device: Device of the tensors: `"cpu"`, `"gpu"` or a torch device; a GPU if there is one.
        timeout: Seconds to wait for the other ranks.
    """
    if is_initialized() or get_world_size() == 1:
        return
    join(device=choose_device(as_torch_device(device)), timeout_s=timeout)


def get_world_size() -> int:
    """Return the number of ranks."""
    return torch_dist.get_world_size() if is_initialized() else _world().world_size


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank, or its rank in a group."""
    return torch_dist.get_rank(group) if is_initialized() else _world().rank


def get_local_rank() -> int:
    """Return this process's rank among those of its node."""
    return _world().local_rank


def get_local_world_size() -> int:
    """Return the number of ranks of this node."""
    return _world().local_world_size


def get_node_rank() -> int:
    """Return this node's number."""
    world = _world()
    return world.rank // world.local_world_size


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for the other ranks, or for those of a group."""
    if is_initialized():
        torch_dist.barrier(group=group)


def all_reduce(
    tensor: torch.Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None
) -> None:
    """Reduce a tensor over ranks, in place: `SUM`, `PRODUCT`, `MIN` or `MAX`."""
    if is_initialized():
        torch_dist.all_reduce(tensor, op=_REDUCTIONS[reduce_operation], group=group)


def all_gather(tensor: torch.Tensor, group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return every rank's tensor; all have one shape."""
    if not is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(gathered, tensor, group=group)
    return gathered


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object."""
    if not is_initialized():
        return [obj]
    gathered: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(gathered, obj, group=group)
    return gathered


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Broadcast the tensor of rank `src` to every rank, in place."""
    if is_initialized():
        torch_dist.broadcast(tensor, src, group=group)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Broadcast the objects of rank `src` to every rank, in place."""
    if is_initialized():
        torch_dist.broadcast_object_list(object_list, src, group=group)


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[Any]:
    """Return a sampler of this rank's share of a data set, shuffled by a seed."""
    return DistributedSampler(
        dataset,
        drop_last=drop_last,
        shuffle=shuffle,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        seed=seed,
    )


__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
]
