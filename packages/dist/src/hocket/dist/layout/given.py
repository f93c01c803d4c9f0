"""Models that arrive laid out over ranks, by `fully_shard`, `parallelize_module` or what calls them.

The axes whose ranks have data of their own are found in the meshes: they are those over which `fully_shard`
reduces gradients. Where only other axes cut the model, all ranks of them share their data.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hocket.dist.errors import ModelError
from hocket.dist.layout.used_parameters import param_groups


def is_laid_out(model: nn.Module) -> bool:
    """Return whether a model has sharded parameters already."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def find_data_ranks(model: nn.Module) -> list[int]:
    """Return the ranks, this one among them, that have data of their own and reduce gradients together.

    Raises:
        ModelError: The meshes do not tell: `fully_shard` uses several, or nothing reduces gradients over
            ranks that are not on the model's meshes.
    """
    meshes = _data_meshes(model)
    if len(meshes) > 1:
        raise ModelError(
            f"{type(model).__name__} is sharded by `fully_shard` over several groups of ranks, "
            f"{sorted(meshes)}, so the ranks with data of their own cannot be found. Give all modules the "
            "same `mesh`, or the plain model and a `parallelism_config`"
        )
    if meshes:
        _check_whole(model)
        return list(next(iter(meshes)))
    sizes: dict[int, str] = {}
    for name, one in model.named_parameters():
        if isinstance(one, DTensor):
            sizes.setdefault(one.device_mesh.size(), name)
    size = dist.get_world_size()
    if set(sizes) != {size}:
        few = min(sizes)
        raise ModelError(
            f"`{sizes[few]}` is cut over {few} of {size} ranks, and nothing reduces gradients over the "
            "others. Call `fully_shard(model, mesh=mesh[...])` with the axes whose ranks have data of their "
            "own, or give the plain model and `parallelism_config={'tp': …}`"
        )
    return [dist.get_rank()]


def describe_meshes(model: nn.Module) -> str:
    """Return the axes of the model's meshes in words."""
    shapes: dict[str, None] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names: Iterable[str] = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
            shapes[" × ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))] = None
    return " and ".join(shapes)


def whole_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of all ranks of which `fully_shard` has some axes; None if there are no other axes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                part: Any = group.mesh_info.mesh
                find = getattr(part, "_get_root_mesh", None)
                root: DeviceMesh | None = None if find is None else find()
                has_names = root is not None and bool(root.mesh_dim_names) and bool(part.mesh_dim_names)
                is_larger = root is not None and root.size() == dist.get_world_size() > part.size()
                return root if has_names and is_larger else None
    return None


def _data_meshes(model: nn.Module) -> set[tuple[int, ...]]:
    """Return the ranks of each mesh over which `fully_shard` reduces gradients of the model."""
    return {
        tuple(group.mesh_info.mesh.mesh.flatten().tolist())
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
        if group.fsdp_params
    }


def _check_whole(model: nn.Module) -> None:
    """Refuse trainable parameters that are on no mesh: nothing reduces their gradients."""
    for name, one in model.named_parameters():
        if one.requires_grad and not isinstance(one, DTensor):
            raise ModelError(
                f"`{name}` is whole, unlike other parameters of {type(model).__name__}, and nothing reduces "
                "its gradient over the ranks. Freeze it, or leave it out of `ignored_params` of `fully_shard`"
            )
