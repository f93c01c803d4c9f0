"""The device mesh that a model is sharded on."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hocket.dist.config import FSDPConfig
from hocket.dist.errors import ConfigError


def degrees(config: FSDPConfig, world_size: int) -> tuple[int, int]:
    """Return (replicate, shard), the sizes of the mesh's axes, for this many ranks.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks.
    """
    replicate = config.data_parallel_replicate_degree or 1
    shard = config.data_parallel_shard_degree
    if shard == -1:
        if world_size % replicate:
            raise ConfigError(
                f"`data_parallel_replicate_degree` is {replicate}, which does not divide {world_size} ranks. "
                "Choose a divisor."
            )
        shard = world_size // replicate
    if replicate * shard != world_size:
        raise ConfigError(
            f"`data_parallel_replicate_degree` × `data_parallel_shard_degree` is {replicate} × {shard}, but "
            f"the job has {world_size} ranks. Leave the shard degree at -1 to fill them."
        )
    resharded = config.reshard_after_forward
    if not isinstance(resharded, bool) and (resharded >= shard or shard % resharded):
        raise ConfigError(
            f"`reshard_after_forward` is {resharded}: it must divide the shard degree ({shard}) and be "
            "smaller. Use True or False."
        )
    return replicate, shard


def build_mesh(config: FSDPConfig, *, device: torch.device, world_size: int) -> DeviceMesh:
    """Return a mesh with the axis `shard`, and before it `replicate` where there are several copies.

    Collective. Needs an initialised process group.
    """
    replicate, shard = degrees(config, world_size)
    if replicate == 1:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
