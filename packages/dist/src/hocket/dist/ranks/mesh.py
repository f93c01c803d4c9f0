"""The device mesh that a model is sharded on."""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ConfigError
from hocket.dist.ranks.world import World

_GROUP = re.compile(r"(set|mod)(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The sizes of the mesh's axes.

    Attributes:
        replicate: Number of copies of the model.
        shard: Ranks that share one copy.
        is_strided: Whether a copy is spread over every `replicate`-th rank instead of consecutive ranks.
    """

    replicate: int
    shard: int
    is_strided: bool = False

    def ranks(self) -> torch.Tensor:
        """Return the ranks of the mesh, `(replicate, shard) int64`; a row shares one copy."""
        ranks = torch.arange(self.replicate * self.shard, device="cpu")
        if self.is_strided:
            return ranks.view(self.shard, self.replicate).t().contiguous()
        return ranks.view(self.replicate, self.shard)


def mesh_shape(config: FSDPConfig, world: World) -> MeshShape:
    """Return the sizes of the mesh's axes for this many ranks.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks, or contradict the strategy or the
            process group.
    """
    shape = _named_shape(config, world) or _shape_of_degrees(config, world.world_size)
    resharded = config.reshard_after_forward
    if not isinstance(resharded, bool) and (resharded >= shape.shard or shape.shard % resharded):
        raise ConfigError(
            f"`reshard_after_forward` is {resharded}: it must divide the shard degree ({shape.shard}) and be "
            "smaller. Use True or False"
        )
    return shape


def build_mesh(shape: MeshShape, *, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Return a mesh with the axis `shard`, and before it `replicate` where there are several copies.

    Collective. Needs an initialised process group.

    Args:
        shape: The sizes of the axes.
        device: The device of training.
        timeout_s: Seconds that a collective within an axis may take.
    """
    if shape.replicate == 1:
        return init_device_mesh(device.type, (shape.shard,), mesh_dim_names=("shard",))
    ranks = shape.ranks()
    # Made here, because groups that a mesh makes by itself have torch's timeout, of up to half an hour.
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(axis.tolist(), timeout=timedelta(seconds=timeout_s))[0]
        for axis in (ranks.t(), ranks)
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _named_shape(config: FSDPConfig, world: World) -> MeshShape | None:
    """Return the shape that a process group's name or the strategy implies; None if the degrees decide."""
    has_degrees = config.data_parallel_shard_degree != -1 or config.data_parallel_replicate_degree is not None
    size, node = world.world_size, world.local_world_size
    if config.process_group is not None:
        if has_degrees:
            raise ConfigError(
                f"`process_group` is {config.process_group!r} and the degrees are set too "
                f"(`data_parallel_shard_degree` {config.data_parallel_shard_degree}, "
                f"`data_parallel_replicate_degree` {config.data_parallel_replicate_degree}). Set only one of "
                "them"
            )
        return _group_shape(config.process_group, size, node)
    if config.sharding_strategy == "NO_SHARD":
        if config.data_parallel_shard_degree not in (-1, 1):
            raise ConfigError(
                f"`sharding_strategy` is 'NO_SHARD' but `data_parallel_shard_degree` is "
                f"{config.data_parallel_shard_degree}. Leave the degree out, or use 'FULL_SHARD'"
            )
        return MeshShape(replicate=size, shard=1)
    if "HYBRID" in config.sharding_strategy and not has_degrees:
        return _group_shape("node", size, node)
    return None


def _group_shape(name: str, size: int, node: int) -> MeshShape:
    if not isinstance(name, str):
        raise ConfigError(
            f"`process_group` is {name!r}, expected a name. Set `data_parallel_shard_degree` and "
            "`data_parallel_replicate_degree` instead of lists of ranks"
        )
    key = name.lower()
    match = _GROUP.fullmatch(key)
    if key == "self":
        return MeshShape(replicate=size, shard=1)
    if key == "node":
        shard, is_strided = node, False
    elif key == "local_rank_across_nodes":
        shard, is_strided = size // node, True
    elif match and int(match[2]):
        count = int(match[2])
        is_strided = match[1] == "mod"
        shard = size // count if is_strided and size % count == 0 else count
    else:
        raise ConfigError(
            f"`process_group` is {name!r}, expected 'self', 'node', 'local_rank_across_nodes', 'setK' or "
            "'modK' with a number K"
        )
    if size % shard or (size % node and "node" in key):
        raise ConfigError(
            f"`process_group` is {name!r}, which does not divide {size} ranks ({node} on this node) into "
            "equal groups. Set `data_parallel_shard_degree` instead"
        )
    return MeshShape(replicate=size // shard, shard=shard, is_strided=is_strided)


def _shape_of_degrees(config: FSDPConfig, size: int) -> MeshShape:
    replicate = config.data_parallel_replicate_degree or 1
    shard = config.data_parallel_shard_degree
    if shard == -1:
        if size % replicate:
            raise ConfigError(
                f"`data_parallel_replicate_degree` is {replicate}, which does not divide {size} ranks. "
                "Choose a divisor"
            )
        shard = size // replicate
    elif "HYBRID" in config.sharding_strategy and config.data_parallel_replicate_degree is None:
        replicate = size // shard
    if replicate * shard != size:
        raise ConfigError(
            f"`data_parallel_replicate_degree` × `data_parallel_shard_degree` is {replicate} × {shard}, but "
            f"the job has {size} ranks. Leave the shard degree at -1 to use all of them"
        )
    return MeshShape(replicate=replicate, shard=shard)
