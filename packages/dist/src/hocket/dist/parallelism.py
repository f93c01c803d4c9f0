"""The sharded layout of a model over ranks, as the trainer uses it."""

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hocket.dist.config.axes import CP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ModelError
from hocket.dist.job_parallelism import JobParallelism
from hocket.dist.layout.checks.first_passes import FirstPasses
from hocket.dist.layout.checks.loss_check import check_loss
from hocket.dist.layout.checks.model_checks import check_model
from hocket.dist.layout.deferred_init import DeferredModel, RankZeroValues
from hocket.dist.layout.experts import ExpertRanks
from hocket.dist.layout.fsdp import Layout, broadcast_values, describe_groups, layout_dtypes, shard
from hocket.dist.layout.optimizers import release_parameters, remap, takes_both_kinds
from hocket.dist.layout.safetensors_load import load_safetensors
from hocket.dist.layout.sequence.blocks import SequenceBlocks, blocks_of, refuse_generation
from hocket.dist.layout.sequence.exchange import Axis, make_axis
from hocket.dist.layout.tensor_parallelism.cut import CopyCheck, TensorLayout, cut_model, spread_whole
from hocket.dist.layout.tensor_parallelism.gradients import place_gradients
from hocket.dist.layout.tensor_parallelism.loss import LossParallel
from hocket.dist.layout.tensor_parallelism.plans import check_sequence_heads
from hocket.dist.layout.used_parameters import UsedParameters
from hocket.dist.memory.advice import explain_out_of_memory, is_out_of_memory
from hocket.dist.ranks.mesh import build_mesh, mesh_shape
from hocket.dist.ranks.process_group import ProcessGroup, RankGroup, Reduction

_log = logging.getLogger("hocket.dist")


class FSDPParallelism(JobParallelism):
    """Parameters, gradients and optimizer state sharded over the ranks by `fully_shard`.

    Beside that, the matrices of the model may be cut by tensor parallelism. Ranks that share a matrix have
    the same data; what counts data, losses and samples counts each of them once (`data_parallel`).

    Args:
        config: The sharding.
        group: This process's membership; `torch.distributed` is initialised, also in a job of one process.
        tensor_parallel: The degree of tensor parallelism and its plan; None for no axis `tp`. The degree is
            a number of ranks and not -1.
        context_parallel: The ranks that share each sequence, and how they attend; None for no axis `cp`.
        experts: Ranks of `dp_shard` × `cp` that share the experts of the model; 1 for no axis `ep`.

    Raises:
        ConfigError: The config's degrees do not fit the number of ranks.
    """

    def __init__(
        self,
        config: FSDPConfig,
        group: ProcessGroup,
        *,
        tensor_parallel: TensorParallelConfig | None = None,
        context_parallel: ContextParallelConfig | None = None,
        experts: int = 1,
    ) -> None:
        super().__init__(group)
        self.config = config
        self._tensor_parallel = tensor_parallel or TensorParallelConfig()
        self._context_parallel = context_parallel or ContextParallelConfig()
        context = self._context_parallel.degree
        self._shape = shape = mesh_shape(
            config, group.world, context=context, tensor=self._tensor_parallel.degree
        )
        self.num_equal_inputs = shape.tensor
        self._mesh: DeviceMesh | None = build_mesh(shape, device=group.device, timeout_s=group.timeout_s)
        self._experts = ExpertRanks(shape, experts, device=group.device, timeout_s=group.timeout_s)
        self._context: Axis | None = None
        if context > 1:
            dim = list(shape.axes).index(CP)
            self._context = make_axis(
                shape.ranks(),
                dim,
                name=CP,
                rank=group.world.rank,
                timeout_s=group.timeout_s,
                is_balanced=self._context_parallel.is_ring,
            )
        self._data_ranks: RankGroup | ProcessGroup = group
        if shape.inner > 1:
            self.data_parallel = (group.world.rank // shape.inner, shape.data_parallel)
            self._data_ranks = group.divide(shape.ranks().reshape(-1, shape.inner).t().tolist())
        self._model: nn.Module | None = None
        self._layout = "nothing laid out yet"
        self._is_sharded = True
        self._cut: TensorLayout | None = None
        self._blocks: SequenceBlocks | None = None
        self._compared = FirstPasses()
        self._used_parameters: UsedParameters | None = None
        self._loss_parallel: LossParallel | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that parameters are on: `dp_shard`, before it `dp_replicate`, after it `tp`, where used.

        The ranks of `cp` are among those of `dp_shard`.
        """
        if self._mesh is None:
            raise ModelError("this layout is closed. Call `provide` for a new one")
        return self._mesh

    def reduce_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over the data-parallel ranks, as for every layout."""
        return self._data_ranks.reduce_async(values)

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Shard the model in place, and point the optimizers at the shards.

        Collective. Parameters keep their names. Values are those of rank 0 (`sync_module_states`); parameters
        and buffers on the meta device are initialised after sharding, with the same values for every layout
        and number of ranks.

        Args:
            model: Plain; on a real device, on the meta device, or real on rank 0 and meta on the others.
            optimizers: Built over its parameters; groups, options and any state are kept.

        Returns:
            The same model.

        Raises:
            ModelError, WrapError, OptimizerError, WeightsError: The model cannot be laid out.
        """
        check_model(model, has_config=True)
        self._experts.check(model)
        names = release_parameters(model, optimizers)
        try:
            layout = self._shard(model, always=not all(map(takes_both_kinds, optimizers)))
        finally:
            remap(model, optimizers, names)
        if self._cut is not None and self._tensor_parallel.loss_parallel:
            self._loss_parallel = LossParallel(model)
        self._model = model
        self._is_sharded = bool(layout.groups)
        self._layout = (
            f"{len(layout.groups)} groups, {layout_dtypes(self.config, model)}"
            if layout.groups
            else f"nothing to shard beside `{TP}`"
        ) + _levers(self.config)
        if self._cut is not None and optimizers:
            check = CopyCheck(
                model, self._cut.whole, self.mesh[TP], lambda flag: self.reduce_all_async(flag).wait()
            )
            check.watch(optimizers[0])
        self._layout += self._experts.describe()
        if self._context is not None and self._context_parallel.is_ring:
            self._layout += "; attention over positions by a ring"
        if self._cut is not None:
            self._layout += f"; {self._cut.describe(self._shape.tensor)}"
        if self.config.verbose and self.global_rank == 0 and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # what is only shown does not decide a run
                print(f"{self.describe()}\n{describe_groups(model, self.config, layout)}", file=sys.stderr)
        return model

    def _shard(self, model: nn.Module, *, always: bool) -> Layout:
        """Shard the model, and give every parameter and buffer values. Collective.

        Args:
            model: Plain.
            always: Whether all parameters become DTensors, also where `tp` alone cuts some.
        """
        seed, is_rank_0_only = self._agree_on_values(model)
        rank_zero_values = RankZeroValues(model) if is_rank_0_only else None
        deferred = DeferredModel(model, self.config.param_init_fn)
        if self.config.param_init_fn is not None and not deferred.names and self.global_rank == 0:
            _log.warning(
                "`param_init_fn` is not called: no parameter of %s is on the meta device. Build the model "
                'under `torch.device("meta")`, or leave the function out',
                type(model).__name__,
            )
        if self.config.sync_module_states and rank_zero_values is None and self.world_size > 1:
            broadcast_values(model, self.device)
        data_mesh = self.mesh
        tensor, tensor_mesh = self._tensor_parallel, None
        if self._shape.tensor > 1:
            data_mesh, tensor_mesh = self.mesh[self._shape.sharding_axes], self.mesh[TP]
        self._blocks = blocks = None
        if self._context is not None or (tensor_mesh is not None and tensor.sequence_parallel):
            self._blocks = blocks = blocks_of(
                model,
                self._context,
                tensor_mesh if tensor.sequence_parallel else None,
                context_parallel=self._context_parallel,
            )
        if self._context is not None:
            check_sequence_heads(model, self._context_parallel, tensor.degree)
        if tensor_mesh is not None:
            self._cut = cut_model(
                model,
                tensor.plan,
                tensor_mesh,
                blocks=blocks if tensor.sequence_parallel else None,
                has_cut_loss=tensor.loss_parallel,
            )
        if blocks is not None:
            blocks.attach(model)
        cut, stacks = self._experts.cut(model, self.mesh)
        ignored = (*self.config.ignored_modules, *cut)
        config = replace(self.config, ignored_modules=ignored)
        layout = shard(model, config, data_mesh, stacks=stacks, always=always)
        if self._shape.tensor > 1:
            spread_whole(model, self.mesh)
        values_device = torch.device("cpu") if self.config.cpu_offload else self.device
        if rank_zero_values is not None:
            rank_zero_values.send(model, into=values_device, over=self.device)
        deferred.allocate(values_device)
        self._place(model, layout)
        loaded_names = set[str]()
        if self.config.initial_weights is not None:
            loaded_names = load_safetensors(model, self.config.initial_weights)
        if rank_zero_values is None:
            deferred.initialize(seed, given=loaded_names)
        if not layout.groups:
            place_gradients(model)
        return layout

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Reduce the gradients of the next backward passes over the ranks, or accumulate them locally.

        `gradient_sync` of the config decides what False means: `every` reduces all the same, `replicas_last`
        reduces within each copy of the model, `last` reduces nothing and needs memory for whole gradients.

        Args:
            model: The result of `lay_out`.
            when: True for the last microbatch of a batch.
        """
        if not self._is_sharded and model is self._model:
            return
        if not isinstance(model, FSDPModule):
            raise ModelError(f"{type(model).__name__} is not sharded. Pass the result of `lay_out`")
        policy = self.config.sync_policy
        if policy == "every":
            return
        if self._used_parameters is not None:
            self._used_parameters.is_syncing = when
        if policy == "last":
            model.set_requires_gradient_sync(when)
        else:
            model.set_requires_all_reduce(when)

    def describe(self) -> str:
        """Describe the layout in one line, such as "FSDP2 (FULL_SHARD), 4 ranks: dp_shard 4; 13 groups…"."""
        axes = " × ".join(f"{axis} {size}" for axis, size in self._shape.axes.items())
        kind = f"FSDP2 ({self.config.sharding_strategy})" if self._is_sharded else "tensor parallelism"
        return f"{kind}, {self.world_size} ranks: {axes}; {self._layout}"

    def check_generation(self, *, has_cache: bool) -> None:
        """Refuse to generate with a model that cuts sequences, since those of one token cannot be cut.

        Raises:
            ModelError: It does.
        """
        has_parts = self._tensor_parallel.sequence_parallel
        refuse_generation(has_context=self._context is not None, has_parts=has_parts)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Compare the loss of the first batch over the ranks that share its data. Collective.

        Raises:
            ModelError: Ranks of `tp` have different losses.
        """
        groups = {} if self._shape.tensor == 1 else {TP: self.mesh[TP].get_group()}
        if self._context is not None:
            groups[CP] = self._context.group
        if groups:
            check_loss(
                loss,
                groups,
                lambda flags: self.reduce_all_async(flags).wait(),
                has_parts=self._tensor_parallel.sequence_parallel,
                is_told=self.global_rank == 0,
            )

    def compare_uncompiled(self, forward: Callable[[], object]) -> bool:
        """Compare what cut modules compute in a pass of a compiled model; see `Collectives`. Collective.

        Raises:
            ModelError: They do not compute what whole ones do.
        """
        given = (self._blocks, None if self._cut is None else self._cut.check)
        checks = [one for one in given if one is not None]
        pending = [any(one.is_pending for one in checks)]
        if not checks:
            return False
        if not self._compared.is_due():
            for one in checks:
                one.leave_out_pass()
        elif self.reduce_all_async(torch.tensor(pending, dtype=torch.float64, device="cpu")).wait().item():
            forward()
        else:
            self._compared.end()
        return not self._compared.has_ended

    def draw_ranks(self) -> str:
        """Return a picture of the ranks by axis; empty where there is one axis."""
        return self._shape.draw() if len(self._shape.axes) > 1 else ""

    def close(self) -> None:
        """Leave the process group, if it was made here. Safe to call twice.

        While an out-of-memory error is handled, a note with the levers that save memory is added to it.
        """
        error = sys.exception()
        if error is not None and self._model is not None and is_out_of_memory(error):
            error.add_note(explain_out_of_memory(self._model, self.config, self._shape, self.device))
        if self._loss_parallel is not None:
            self._loss_parallel.close()
            self._loss_parallel = None
        self._model = self._used_parameters = self._context = self._blocks = None
        self._mesh = None  # it keeps the sockets of groups open
        self._experts.close()
        super().close()

    def _agree_on_values(self, model: nn.Module) -> tuple[int, bool]:
        """Return rank 0's seed, and whether only rank 0 has values. Collective.

        Raises:
            ModelError: Ranks differ in the parameters that have values, and not because only rank 0 has any.
        """
        rank, size = self.global_rank, self.world_size
        report = torch.zeros(1 + size, dtype=torch.int64, device="cpu")
        if rank == 0:
            report[0] = torch.initial_seed() & (2**62 - 1)
        report[1 + rank] = sum(parameter.is_meta for parameter in model.parameters())
        seed, *counts = self._group.reduce_async(report).wait().tolist()
        total = sum(1 for _ in model.parameters())
        is_rank_0_only = size > 1 and counts[0] == 0 and set(counts[1:]) == {total}
        if len(set(counts)) > 1 and not is_rank_0_only:
            raise ModelError(
                f"parameters on the meta device, by rank: {counts} of {total}. Build the model alike on all "
                "ranks, or with values on rank 0 and on the meta device everywhere else"
            )
        return seed, is_rank_0_only

    def _place(self, model: nn.Module, layout: Layout) -> None:
        """Move whole parameters to the device, and have their gradients averaged; `fully_shard` does neither.

        Ranks are also made to agree on the parameters that they use. Where `tp` alone cuts the model, they
        have the same data, and so the same gradients of whole parameters.
        """
        if not layout.groups:
            for tensor in (*model.parameters(), *model.buffers()):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
            return
        # Those of experts are cut, and averaged there.
        whole = {name: model.get_parameter(name) for name in layout.ignored if not self._experts.is_cut(name)}
        for parameter in whole.values():
            parameter.data = parameter.data.to(self.device)
        if self.world_size > 1:
            self._used_parameters = UsedParameters(
                model,
                whole,
                add_up=lambda counts: self.reduce_all_async(counts).wait(),
                num_ranks=self.world_size,
                always_exchanges=self.config.find_unused_parameters,
            )


def _levers(config: FSDPConfig) -> str:
    """Name the memory levers that are on, for the description."""
    interval = config.activation_checkpointing_every
    words = [
        (
            "activations checkpointed" + (f" in every {interval}. block" if interval > 1 else ""),
            config.activation_checkpointing,
        ),
        ("activations offloaded", config.activation_cpu_offload),
        ("parameters and optimizer state in host memory", config.cpu_offload),
    ]
    return "".join(f", {word}" for word, is_on in words if is_on)
