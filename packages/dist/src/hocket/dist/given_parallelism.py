"""The layout of a model that arrives laid out, as the trainer uses it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hocket.dist.errors import ModelError
from hocket.dist.job_parallelism import JobParallelism
from hocket.dist.layout.fsdp import gather_in_methods
from hocket.dist.layout.given import describe_meshes, find_data_ranks, is_laid_out, whole_mesh
from hocket.dist.layout.optimizers import name_parameters, remap
from hocket.dist.layout.tensor_parallelism.cut import spread_whole
from hocket.dist.ranks.process_group import ProcessGroup, Reduction


class GivenParallelism(JobParallelism):
    """A model whose parameters are sharded already, and stay as they are.

    Args:
        group: This process's membership; the process group is the one that the model's meshes use.
        model: The model.

    Raises:
        ModelError: The ranks with data of their own cannot be found in the model's meshes.
    """

    def __init__(self, group: ProcessGroup, model: nn.Module) -> None:
        super().__init__(group)
        row = find_data_ranks(model)
        rows = group.gather_objects(row)
        self.data_parallel = (row.index(self.global_rank), len(row))
        self.num_equal_inputs = self.world_size // len(row)
        self._data_ranks = group.divide(sorted({tuple(one) for one in rows}))
        self._model = model

    def reduce_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over the data-parallel ranks, as for every layout."""
        return self._data_ranks.reduce_async(values)

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Return the model as it is; its values, shards and the way it computes stay.

        The placements of parameters that only `fully_shard` cuts name the other axes of its mesh, too, so
        that all ranks know who holds them.

        Args:
            model: The one that was given before, or one that holds its parameters.
            optimizers: Built over its parameters as they are now.

        Raises:
            ModelError: The model has no sharded parameters.
            OptimizerError: An optimizer holds parameters that are not the model's.
        """
        if not is_laid_out(model):
            raise ModelError(
                f"{type(model).__name__} has no sharded parameters, unlike the model that was given before. "
                "Shard it before the trainer is made"
            )
        names = name_parameters(model, optimizers)
        if (mesh := whole_mesh(model)) is not None:
            spread_whole(model, mesh)
            remap(model, optimizers, names)
        if isinstance(model, FSDPModule):
            gather_in_methods(model)
        self._model = model
        return model

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Do nothing: each backward pass reduces gradients, as the model's own modules do it."""

    def describe(self) -> str:
        """Describe the layout in one line."""
        return (
            f"as the model came, {self.world_size} ranks: {describe_meshes(self._model)}; "
            f"{self.data_parallel[1]} with data of their own"
        )
