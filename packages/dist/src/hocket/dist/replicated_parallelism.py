"""The replicated layout of a model over ranks, as the trainer uses it."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hocket.dist.errors import ModelError
from hocket.dist.job_parallelism import JobParallelism
from hocket.dist.layout.checks.model_checks import check_model
from hocket.dist.layout.optimizers import name_parameters
from hocket.dist.layout.replicate import Replication
from hocket.dist.ranks.process_group import ProcessGroup


class ReplicatedParallelism(JobParallelism):
    """The whole model on every rank, with averaged gradients; a single rank averages nothing.

    Args:
        group: This process's membership.
        find_unused_parameters: Same as in `DistributedDataParallel`.
        syncs_every_pass: Average gradients in each backward pass, regardless of `sync_gradients`.
    """

    def __init__(
        self, group: ProcessGroup, *, find_unused_parameters: bool = False, syncs_every_pass: bool = False
    ) -> None:
        super().__init__(group)
        self._syncs_every_pass = syncs_every_pass
        self._find_unused_parameters = find_unused_parameters
        self._replication: Replication | None = None
        self._model: nn.Module | None = None

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Move the model to the device and route its forward through DDP; parameters stay the same objects.

        Collective. Values become those of rank 0.

        Args:
            model: Plain, with values.
            optimizers: Built over its parameters; left as they are.

        Returns:
            The same model.

        Raises:
            ModelError: The model has no parameters, is laid out already, or has parameters without values.
            OptimizerError: An optimizer holds parameters that are not the model's.
        """
        check_model(model, has_config=False)
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty:
            raise ModelError(
                f"{len(empty)} parameters are on the meta device and have no values, the first `{empty[0]}`. "
                "Build the model on a real device, or set `fsdp_config={'sharding_strategy': 'NO_SHARD'}`, "
                "which initialises them"
            )
        name_parameters(model, optimizers)
        model.to(self.device)
        if self.world_size > 1:
            self._replication = Replication(
                model, device=self.device, find_unused_parameters=self._find_unused_parameters
            )
        self._model = model
        return model

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Average the gradients of the next backward passes over the ranks, or accumulate them locally.

        Args:
            model: The result of `lay_out`.
            when: True to average; takes effect from the next forward on.
        """
        if model is not self._model:
            raise ModelError(
                f"this {type(model).__name__} was not laid out here. Pass the result of `lay_out`"
            )
        if self._replication is not None and not self._syncs_every_pass:
            self._replication.sync_gradients(when)

    def describe(self) -> str:
        """Describe the layout in one line."""
        size = self.world_size
        return "one process" if size == 1 else f"replicated on {size} ranks, gradients averaged"

    def close(self) -> None:
        """Restore the model's own forward and leave the process group. Safe to call twice."""
        if self._replication is not None:
            self._replication.detach()
            self._replication = None
        super().close()
