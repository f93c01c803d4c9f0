"""The two layouts of a model over ranks, as the trainer asks for them: sharded, and replicated.

Both have the same four verbs (`lay_out`, `sync_gradients`, `clip_grad_norm_`, `reduce_async`) and the
attribute `data_parallel`, which is the trainer's `Parallelism` protocol, and both own a `ProcessGroup` that
`close` leaves.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hocket.dist.clipping import clip_grad_norm_
from hocket.dist.config import FSDPConfig
from hocket.dist.errors import ModelError
from hocket.dist.fsdp import check_model, layout_dtypes, shard
from hocket.dist.mesh import build_mesh, degrees
from hocket.dist.optimizers import name_parameters, remap
from hocket.dist.process_group import ProcessGroup, Reduction
from hocket.dist.replicate import Replica


class _InGroup:
    """What both layouts have: the process group, and what goes over it whatever the layout.

    Attributes:
        data_parallel: (rank, size): which of how many equal shares of a batch this process takes.
        device: Where the model is.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.data_parallel: tuple[int, int] = (group.world.rank, group.world.world_size)
        self.device = group.device

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients in place to a joint 2-norm of at most `max_norm`, by `hocket.dist.clip_grad_norm_`.

        Collective where they are sharded. Returns the norm before, a plain scalar equal on all ranks.
        """
        return clip_grad_norm_(parameters, max_norm)

    def reduce_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over all ranks and return at once; `.wait()` gives it.

        Collective. CPU tensors go over a gloo group of their own, apart from the gradients.
        """
        return self._group.reduce_async(values)

    def close(self) -> None:
        """Leave the process group, if it was made here. Safe to call twice."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FSDPParallelism(_InGroup):
    """Parameters, gradients and optimizer state sharded over the ranks by `fully_shard`.

    Args:
        config: How to shard.
        group: This process's membership; `torch.distributed` is initialised, also in a job of one process.

    Raises:
        ConfigError: The config's degrees do not fit the number of ranks.
    """

    def __init__(self, config: FSDPConfig, group: ProcessGroup) -> None:
        super().__init__(group)
        self.config = config
        self._mesh: DeviceMesh | None = build_mesh(
            config, device=group.device, world_size=group.world.world_size
        )
        self._layout = "nothing laid out yet"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the ranks, with the axis `shard`, and `replicate` before it where there are copies."""
        if self._mesh is None:
            raise ModelError("This layout was closed: its ranks have parted. Ask `provide` for a new one.")
        return self._mesh

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Shard the model in place, and point the optimizers at the shards.

        Collective. Names of parameters stay; their values become those of rank 0 (`sync_module_states`).

        Args:
            model: Plain, with values.
            optimizers: Built over its parameters; groups, options and any state are kept.

        Returns:
            The same model.

        Raises:
            ModelError, WrapError, OptimizerError: It cannot be done; nothing has been changed then.
        """
        check_model(model)
        names = name_parameters(model, optimizers)
        groups = shard(model, self.config, self.mesh)
        remap(model, optimizers, names)
        self._layout = f"{len(groups)} groups, {layout_dtypes(self.config, model)}"
        return model

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Reduce the gradients of the next backwards over the ranks, or let them add up until told to.

        Args:
            model: What `lay_out` returned.
            when: False keeps whole gradients on each rank, and needs the memory for them.
        """
        if not isinstance(model, FSDPModule):
            raise ModelError(f"{type(model).__name__} is not sharded. Give what `lay_out` returned.")
        model.set_requires_gradient_sync(when)

    def describe(self) -> str:
        """Say the layout in one line, such as "FSDP2, 4 ranks: shard 4; 13 groups, …"."""
        replicate, shard_degree = degrees(self.config, self.data_parallel[1])
        axes = f"replicate {replicate} × shard {shard_degree}" if replicate > 1 else f"shard {shard_degree}"
        return (
            f"FSDP2 ({self.config.sharding_strategy}), {self.data_parallel[1]} ranks: {axes}; {self._layout}"
        )

    def close(self) -> None:
        """Leave the process group, if it was made here. Safe to call twice."""
        self._mesh = None  # it keeps the group's sockets open
        super().close()


class ReplicatedParallelism(_InGroup):
    """The whole model on every rank, gradients averaged; on one rank nothing is done at all.

    Args:
        group: This process's membership.
        find_unused_parameters: As `DistributedDataParallel` has it.
    """

    def __init__(self, group: ProcessGroup, *, find_unused_parameters: bool = False) -> None:
        super().__init__(group)
        self._find_unused_parameters = find_unused_parameters
        self._replica: Replica | None = None
        self._model: nn.Module | None = None

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Move the model to the device and let its forward average gradients; parameters stay themselves.

        Collective. Values become those of rank 0.

        Args:
            model: Plain, with values.
            optimizers: Built over its parameters; left as they are.

        Returns:
            The same model.

        Raises:
            ModelError: It has no parameters, or some without values.
            OptimizerError: An optimizer holds parameters that are not the model's.
        """
        check_model(model)
        name_parameters(model, optimizers)
        model.to(self.device)
        if self.data_parallel[1] > 1 and any(parameter.requires_grad for parameter in model.parameters()):
            self._replica = Replica(
                model, device=self.device, find_unused_parameters=self._find_unused_parameters
            )
        self._model = model
        return model

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Average the gradients of the next backwards over the ranks, or let them add up until told to.

        Args:
            model: What `lay_out` returned.
            when: Holds from the next forward on.
        """
        if model is not self._model:
            raise ModelError(
                f"This {type(model).__name__} was not laid out here. Give what `lay_out` returned."
            )
        if self._replica is not None:
            self._replica.sync_gradients(when)

    def describe(self) -> str:
        """Say the layout in one line."""
        size = self.data_parallel[1]
        return "one process" if size == 1 else f"replicated on {size} ranks, gradients averaged"

    def close(self) -> None:
        """Give the model its own forward back and leave the process group. Safe to call twice."""
        if self._replica is not None:
            self._replica.detach()
            self._replica = None
        super().close()
