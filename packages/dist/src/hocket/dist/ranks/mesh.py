"""The device mesh that a model is sharded on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hocket.dist.config.axes import CP, DP_REPLICATE, DP_SHARD, EP, TP
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ConfigError
from hocket.dist.ranks.world import World

_GROUP = re.compile(r"(set|mod)(\d+)")
_MOST_SHOWN = 8
"""Ranks in a row, and rows, of a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The sizes of the mesh's axes.

    Attributes:
        replicate: Number of copies of the model.
        shard: Ranks that share one copy of what a rank of the innermost axis holds.
        context: Ranks that share a sequence. They share the parameters, too, as those of `shard` do.
        tensor: Ranks that share each matrix that is cut, the innermost axis.
        is_strided: Whether a copy is spread over every `replicate`-th rank instead of consecutive ranks.
    """

    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    is_strided: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """The axes by name, outermost first; `dp_shard` is there also where it has one rank."""
        sizes = {DP_REPLICATE: self.replicate, DP_SHARD: self.shard, CP: self.context, TP: self.tensor}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == DP_SHARD}

    @property
    def parameter_axes(self) -> dict[str, int]:
        """The axes of the mesh that parameters are on: `dp_shard` has the ranks of `cp`, too."""
        sizes = {**self.axes, DP_SHARD: self.shard * self.context}
        return {axis: size for axis, size in sizes.items() if axis != CP}

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The axes of that mesh over which `fully_shard` shards and copies parameters."""
        return tuple(axis for axis in self.parameter_axes if axis != TP)

    @property
    def inner(self) -> int:
        """The number of consecutive ranks that share their data."""
        return self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """The number of ranks with data of their own."""
        return self.replicate * self.shard

    def ranks(self) -> torch.Tensor:
        """Return the ranks of the mesh as int64, with a dim for each of `axes`."""
        ranks = torch.arange(self.replicate * self.shard * self.inner, device="cpu")
        if self.is_strided:
            ranks = ranks.view(self.shard, self.replicate).t().contiguous()
        return ranks.view(tuple(self.axes.values()))

    def draw(self) -> str:
        """Return a picture of the ranks, in which each row is a slice along the innermost axis."""
        axes = self.axes
        rows = self.ranks().reshape(-1, tuple(axes.values())[-1])
        width = len(str(rows.max().item()))
        shown = [_cut_short([f"{rank:>{width}}" for rank in row], " ") for row in rows.tolist()]
        *outer, inner = axes
        title = f"{inner} →" if not outer else f"{' × '.join(outer)} ↓, {inner} →"
        return f"{title}\n{_cut_short(shown, chr(10))}"


def mesh_shape(config: FSDPConfig, world: World, *, context: int = 1, tensor: int = 1) -> MeshShape:
    """Return the sizes of the mesh's axes for this many ranks.

    Args:
        config: The sharding.
        world: The place of this process in the job.
        context: Degree of context parallelism.
        tensor: Degree of tensor parallelism. The product of both divides the number of ranks.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks, or contradict the strategy or the
            process group.
    """
    if context * tensor > 1:
        shape = replace(_data_shape(config, world, context, tensor), context=context, tensor=tensor)
    else:
        shape = _named_shape(config, world) or _shape_of_degrees(config, world.world_size)
    resharded = config.reshard_after_forward
    shard = shape.parameter_axes[DP_SHARD]
    if not isinstance(resharded, bool) and (resharded >= shard or shard % resharded):
        raise ConfigError(
            f"`reshard_after_forward` is {resharded}: it must divide the shard degree ({shard}) and be "
            "smaller. Use True or False"
        )
    return shape


def build_mesh(
    shape: MeshShape, *, device: torch.device, timeout_s: float, place: tuple[int, int] = (0, 1)
) -> DeviceMesh:
    """Return a mesh with the axes of `shape` that parameters are on.

    Collective. Needs an initialised process group.

    Args:
        shape: The sizes of the axes.
        device: The device of training.
        timeout_s: Seconds that a collective within an axis may take.
        place: The index of the mesh among meshes of one shape, such as those of pipeline stages, and their
            number. The ranks of a mesh are consecutive.
    """
    names, sizes = tuple(shape.parameter_axes), tuple(shape.parameter_axes.values())
    if len(names) == 1 and place[1] == 1:
        return init_device_mesh(device.type, sizes, mesh_dim_names=names)
    ranks = _ranks_of_meshes(shape, sizes, place[1])
    return _mesh_of(ranks, place[0], names, device=device, timeout_s=timeout_s)


def build_expert_mesh(
    shape: MeshShape,
    experts: int,
    *,
    device: torch.device,
    timeout_s: float,
    place: tuple[int, int] = (0, 1),
) -> DeviceMesh:
    """Return the mesh of experts that fewer ranks share than share the other parameters.

    The ranks over which `fully_shard` cuts parameters are two axes there: consecutive ranks of `ep` share the
    experts, and those of `dp_shard` have parts of the same ones. Collective.

    Args:
        shape: The sizes of the axes.
        experts: The ranks of `ep`, a divisor of those over which parameters are cut.
        device: The device of training.
        timeout_s: Seconds that a collective within an axis may take.
        place: As in `build_mesh`.
    """
    sizes: dict[str, int] = {}
    for axis, size in shape.parameter_axes.items():
        sizes |= {DP_SHARD: size // experts, EP: experts} if axis == DP_SHARD else {axis: size}
    ranks = _ranks_of_meshes(shape, tuple(sizes.values()), place[1])
    return _mesh_of(ranks, place[0], tuple(sizes), device=device, timeout_s=timeout_s)


def _ranks_of_meshes(shape: MeshShape, sizes: tuple[int, ...], number: int) -> torch.Tensor:
    """Return the ranks of several meshes of one shape, with the meshes along the first dim."""
    one = shape.ranks().reshape(sizes)
    return torch.stack([one + index * one.numel() for index in range(number)])


def _mesh_of(
    ranks: torch.Tensor, index: int, names: tuple[str, ...], *, device: torch.device, timeout_s: float
) -> DeviceMesh:
    """Return one of several meshes of the same axes, whose ranks are `ranks[index]`. Collective."""
    # Made here, because groups that a mesh makes by itself have torch's timeout, of up to half an hour.
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(
            ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist(),
            timeout=timedelta(seconds=timeout_s),
        )[0]
        for axis in range(1, ranks.ndim)
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks[index], mesh_dim_names=names)


def _data_shape(config: FSDPConfig, world: World, context: int, tensor: int) -> MeshShape:
    """Return the sizes of the data-parallel axes beside context and tensor parallelism."""
    if world.local_world_size % tensor and world.local_world_size < world.world_size:
        raise ConfigError(
            f"`tp` is {tensor}, which does not divide the {world.local_world_size} ranks of this machine. "
            "Choose a divisor, so that ranks that share a matrix are on one machine"
        )
    inner = context * tensor
    node = max(1, world.local_world_size // inner)
    num_places = world.world_size // inner
    place = World(world_size=num_places, local_world_size=min(node, num_places))
    shape = _named_shape(config, place) or _shape_of_degrees(config, num_places)
    if shape.is_strided:
        raise ConfigError(
            f"`process_group` is {config.process_group!r}, `{CP}` is {context} and `{TP}` is {tensor}. Set "
            "`dp_shard` and `dp_replicate` instead"
        )
    return shape


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


def _cut_short(parts: Sequence[str], separator: str) -> str:
    """Join parts, of many only the first ones and the last."""
    shown = list(parts) if len(parts) <= _MOST_SHOWN else [*parts[: _MOST_SHOWN - 1], "…", parts[-1]]
    return separator.join(shown)
