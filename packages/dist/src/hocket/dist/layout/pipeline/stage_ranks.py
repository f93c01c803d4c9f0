"""The ranks of pipelines: those of a stage with the axes inside of it, and those of a pipeline."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from hocket.dist.config.axes import CP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.experts import ExpertRanks
from hocket.dist.layout.sequence.exchange import Axis, make_axis
from hocket.dist.ranks.mesh import MeshShape, build_mesh, mesh_shape
from hocket.dist.ranks.process_group import ProcessGroup, RankGroup
from hocket.dist.ranks.world import World


class StageRanks:
    """The place of this process among the ranks of its stage and of its pipeline. Its making is collective.

    The ranks of a stage are consecutive, with the axes `dp_replicate`, `dp_shard`, `cp` and `tp` among them,
    `tp` the innermost. A pipeline has the ranks of all stages that have the same place in their stage.

    Args:
        group: This process's membership.
        degree: The ranks of a pipeline.
        sharding: The sharding of a stage over its ranks; None for copies of the stage.
        context_parallel: The ranks that share each sequence, and how they attend; None if none do.
        tensor: Ranks that share each matrix.
        experts: Ranks of a stage that share its experts; 1 if none do, as without `sharding`.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks of a stage.

    Attributes:
        stage: The ranks that have the stages of this one.
        pipe: The ranks of this one's pipeline.
        data: Those ranks of the stage with data of their own of which this is one.
        data_parallel: (rank, size) of this one among them.
        axes: The number of ranks of a stage along each axis.
        tensor: Ranks that share each matrix.
        context_parallel: How ranks that share sequences attend.
        context: The ranks that share sequences; None if none do.
        experts: The ranks of a stage that share its experts.
    """

    def __init__(
        self,
        group: ProcessGroup,
        degree: int,
        sharding: FSDPConfig | None,
        *,
        context_parallel: ContextParallelConfig | None = None,
        tensor: int = 1,
        experts: int = 1,
    ) -> None:
        size = group.world.world_size // degree
        rows = torch.arange(size * degree, device="cpu").view(degree, size)
        self._job, self._pipes = group, rows.t()
        self.stage = group.divide(rows.tolist())
        self.pipe = group.divide(rows.t().tolist())
        self.data = self.stage
        self.data_parallel = (self.stage.index, size)
        self.tensor = tensor
        self.context_parallel = context_parallel or ContextParallelConfig()
        self.context: Axis | None = None
        context = self.context_parallel.degree
        self._shape = shape = MeshShape(replicate=size, shard=1)
        self._mesh: DeviceMesh | None = None
        if sharding is not None:
            node = min(group.world.local_world_size, size)
            world = World(world_size=size, local_world_size=node)
            self._shape = shape = mesh_shape(sharding, world, context=context, tensor=tensor)
        self.axes = shape.axes
        device, timeout_s, place = group.device, group.timeout_s, (self.pipe.index, degree)
        self.experts = ExpertRanks(shape, experts, device=device, timeout_s=timeout_s, place=place)
        if sharding is None:
            return
        self._mesh = build_mesh(shape, device=device, timeout_s=timeout_s, place=place)
        if shape.inner == 1:
            return
        self.data = _divide_by_data(group, rows, shape.inner)
        self.data_parallel = (self.data.index, len(self.data.ranks))
        if context > 1:
            ranks = torch.stack([shape.ranks() + row[0] for row in rows])
            dim = 1 + list(shape.axes).index(CP)
            self.context = make_axis(
                ranks,
                dim,
                name=CP,
                rank=group.world.rank,
                timeout_s=timeout_s,
                is_balanced=self.context_parallel.is_ring,
            )

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this stage's parameters, on which the ranks of `cp` are among those of `dp_shard`."""
        if self._mesh is None:
            raise ModelError("this layout is closed, or its stages are whole. Call `provide` for a new one")
        return self._mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """The axes of the mesh over which `fully_shard` shards and copies parameters."""
        return self.mesh[self._shape.sharding_axes] if self.tensor > 1 else self.mesh

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The axis `tp` of the mesh; None if no matrix is cut."""
        return self.mesh[TP] if self.tensor > 1 else None

    def between(self, first: int, last: int) -> RankGroup | None:
        """Return the ranks of this one's place at two places of the pipeline; None on others. Collective.

        Args:
            first: A place.
            last: Another one.
        """
        if len(self.pipe.ranks) == 2:
            return self.pipe
        return self._job.divide_some(self._pipes[:, [first, last]].tolist())

    def close(self) -> None:
        """Let the meshes go, which keep the sockets of their groups open."""
        self._mesh = self.context = None
        self.experts.close()


def _divide_by_data(group: ProcessGroup, rows: torch.Tensor, inner: int) -> RankGroup:
    """Return the ranks of a stage that have one place among each `inner` consecutive ranks of one data."""
    by_place = rows.view(len(rows), -1, inner).transpose(1, 2)
    return group.divide(by_place.reshape(-1, by_place.shape[-1]).tolist())
