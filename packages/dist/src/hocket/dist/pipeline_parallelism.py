"""The layout of a model in stages, as the trainer uses it."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ModelError
from hocket.dist.job_parallelism import JobParallelism
from hocket.dist.layout.checks.model_checks import check_model
from hocket.dist.layout.clipping import clip_grad_norm_
from hocket.dist.layout.fsdp import broadcast_values, shard
from hocket.dist.layout.optimizers import (
    GroupNames,
    name_parameters,
    release_parameters,
    remap,
    takes_both_kinds,
)
from hocket.dist.layout.pipeline.blocks import Stage, StageBlocks, describe_error
from hocket.dist.layout.pipeline.relay import StageRelay
from hocket.dist.layout.pipeline.schedule import LossOf, StageSchedule, average_gradients
from hocket.dist.layout.pipeline.stage_checks import (
    check_optimizers,
    check_stages,
    check_values,
    warn_of_dropout,
)
from hocket.dist.layout.pipeline.stage_cut import cut_stage
from hocket.dist.layout.pipeline.stage_ranks import StageRanks
from hocket.dist.layout.pipeline.stages import Stages, cut_stages, drop_other_stages
from hocket.dist.layout.pipeline.tied_weights import TieCheck, TiedWeights
from hocket.dist.layout.sequence.blocks import refuse_generation
from hocket.dist.layout.tensor_parallelism.cut import CopyCheck, TensorLayout, spread_whole
from hocket.dist.layout.tensor_parallelism.gradients import place_gradients
from hocket.dist.layout.tensor_parallelism.loss import LossParallel
from hocket.dist.layout.used_parameters import UsedParameters
from hocket.dist.ranks.process_group import ProcessGroup, Reduction


class PipelineParallelism(JobParallelism):
    """The blocks of a model in stages, one or several on a rank, through which a batch's microbatches go.

    Ranks of one pipeline have the same data, and so have the ranks of a stage that share sequences or
    matrices. With copies, each is a pipeline with data of its own, and the gradients of a stage are averaged
    over its copies. A rank's `named_parameters` are those of its stages, under the names of the whole model.
    A weight that is tied over the first and the last stage is a parameter of both, under its first name.

    Args:
        config: The pipeline.
        group: This process's membership.
        sharding: The sharding of each stage over its ranks; None for copies of the stage.
        tensor_parallel: The degree of tensor parallelism in each stage and its plan; None for no axis `tp`.
        context_parallel: The ranks of a stage that share each sequence; None for no axis `cp`.
        experts: Ranks of a stage that share its experts; 1 for no axis `ep`. This, `context_parallel` and
            `tensor_parallel` need `sharding`.

    Raises:
        ConfigError: The degrees do not multiply to the ranks of a stage.

    Attributes:
        peers: The ranks that have this rank's stages.
        group_names: The names of the parameters of all stages in each group of each optimizer.
        elsewhere: The names of the parameters that only other stages have.
        ties: For each later name of a weight that is tied over two stages its first name.
    """

    def __init__(
        self,
        config: PipelineConfig,
        group: ProcessGroup,
        *,
        sharding: FSDPConfig | None = None,
        tensor_parallel: TensorParallelConfig | None = None,
        context_parallel: ContextParallelConfig | None = None,
        experts: int = 1,
    ) -> None:
        super().__init__(group)
        self.config = config
        self._sharding = sharding
        self._tensor_parallel = tensor = tensor_parallel or TensorParallelConfig()
        self._ranks = StageRanks(
            group,
            config.degree,
            sharding,
            context_parallel=context_parallel,
            tensor=tensor.degree,
            experts=experts,
        )
        self._pipe = self._ranks.pipe
        self.data_parallel = self._ranks.data_parallel
        self.num_equal_inputs = tensor.degree
        self.peers: Sequence[int] = self._ranks.stage.ranks
        self._cut: TensorLayout | None = None
        self._loss_parallel: LossParallel | None = None
        self._model: Any = None
        self._used_parameters: UsedParameters | None = None
        self.group_names: Sequence[GroupNames] = ()
        self.elsewhere: Sequence[str] = ()
        self.ties: Mapping[str, str] = {}
        self._tied: TiedWeights | None = None
        self._blocks: StageBlocks | None = None
        self._schedule: StageSchedule | None = None
        self._has_run = False
        self._described = "nothing laid out yet"

    def lay_out(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Keep this rank's stages of the model, in place, and its parameters in the optimizers.

        Collective. Values are those of rank 0.

        Args:
            model: Plain, with values.
            optimizers: Built over its parameters, without state.

        Returns:
            The same model.

        Raises:
            ModelError, ConfigError, OptimizerError: The model cannot be cut into the stages.
        """
        check_model(model, has_config=True)
        check_values(model)
        self._ranks.experts.check(model)  # all of it, so that every rank refuses it alike
        stages = cut_stages(model, self.config)
        names = name_parameters(model, optimizers)
        check_stages(model, stages)
        check_optimizers(optimizers, names, stages)
        model.to(self.device)
        broadcast_values(model, self.device)
        own = self.config.stages_of(self._pipe.index)
        for optimizer, groups in zip(optimizers, names, strict=True):
            for group, group_names in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = [
                    one
                    for one, name in zip(group["params"], group_names, strict=True)
                    if not stages.holders(name).isdisjoint(own)
                ]
        stand_ins = drop_other_stages(model, stages, own)
        self.group_names, self.elsewhere, self.ties = names, list(stand_ins), stages.ties
        released = release_parameters(model, optimizers)
        failure: Exception | None = None
        try:
            always = not all(map(takes_both_kinds, optimizers))
            self._keep(model, stages, own, stand_ins, always=always)
        except Exception as error:  # noqa: BLE001 - raised below, alike on all ranks
            failure = error
        finally:
            remap(model, optimizers, released)
        self._raise_alike(failure)
        blocks = self._blocks
        assert blocks is not None
        self._tied = self._tie(model, stages)
        if stages.ties and optimizers:
            check = TieCheck(stages.ties, self._tied, lambda flag: self.reduce_all_async(flag).wait())
            check.watch(optimizers)
        self._watch_cut(model, optimizers)
        self._schedule = StageSchedule(
            [Stage(blocks, stage) for stage in own],
            self.config,
            device=self.device,
            group=self._pipe.on_device,
            before_backward=self._before_backward,
        )
        self._described = stages.describe() + self._ranks.experts.describe()
        if self._ranks.context_parallel.is_ring:
            self._described += "; attention over positions by a ring"
        if self._cut is not None:
            self._described += f"; {self._cut.describe(self._ranks.tensor)}"
        if self.global_rank == 0:
            warn_of_dropout(model)
        return model

    def _keep(
        self,
        model: nn.Module,
        stages: Stages,
        own: Sequence[int],
        stand_ins: dict[str, torch.Tensor],
        *,
        always: bool,
    ) -> None:
        """Lay out this rank's stages, whose modules are not those of other ranks. No communication."""
        self._cut, sequences = cut_stage(model, stages, own, self._ranks, self._tensor_parallel)
        self._blocks = StageBlocks(model, stages, own, stand_ins)
        self._blocks.sequences = sequences
        self._blocks.plan_check = None if self._cut is None else self._cut.check
        StageRelay(model, self._blocks, self._pipe, self.config)
        self._shard(model, self._blocks, always=always)

    def _raise_alike(self, error: Exception | None) -> None:
        """Raise the error of this rank or, without one, that of another rank. Collective."""
        told = self._group.gather_objects(None if error is None else describe_error(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(told):
            if failure is not None:
                raise ModelError(f"rank {rank}: {failure}")

    def _shard(self, model: nn.Module, blocks: StageBlocks, *, always: bool) -> None:
        """Shard this rank's stages over its ranks; `always` as for `shard`. No communication."""
        if self._sharding is None:
            return
        for index in blocks.own:
            block = model.get_submodule(blocks.names[index])
            if not hasattr(block, "_fsdp_wrap"):  # also a single one, so that all stages cast alike
                setattr(block, "_fsdp_wrap", True)  # noqa: B010 - the attribute of any module
        experts = self._ranks.experts
        cut, stacks = experts.cut(model, self._ranks.mesh)
        config = replace(self._sharding, ignored_modules=tuple(cut))
        layout = shard(model, config, self._ranks.data_mesh, stacks=stacks, always=always)
        if not layout.groups:
            place_gradients(model)
            return
        if self._ranks.tensor > 1:
            spread_whole(model, self._ranks.mesh)
        self._model = model
        stage = self._ranks.stage
        if (size := len(stage.ranks)) > 1:
            self._used_parameters = UsedParameters(
                model,
                {name: model.get_parameter(name) for name in layout.ignored if not experts.is_cut(name)},
                add_up=lambda counts: stage.reduce_async(counts).wait(),
                num_ranks=size,
                always_exchanges=self._sharding.find_unused_parameters,
                group=stage.on_device,
            )

    def _tie(self, model: nn.Module, stages: Stages) -> TiedWeights | None:
        """Return the weights that this rank shares with one of another stage; None for none. Collective."""
        first, last = (self.config.rank_of(stage) for stage in (0, self.config.num_stages - 1))
        if not stages.ties or first == last:
            return None
        ranks = self._ranks.between(first, last)
        if ranks is None:
            return None
        return TiedWeights([model.get_parameter(name) for name in dict.fromkeys(stages.ties.values())], ranks)

    def _watch_cut(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Check the copies of what is not cut at the first update, and let the loss take cut logits."""
        mesh = self._ranks.tensor_mesh
        if self._cut is None or mesh is None:
            return
        if self._tensor_parallel.loss_parallel:
            self._loss_parallel = LossParallel(model)
        if optimizers:
            check = CopyCheck(model, self._cut.whole, mesh, lambda flag: self.reduce_all_async(flag).wait())
            check.watch(optimizers[0])

    def _before_backward(self, is_last: bool) -> None:
        """Let the last backward pass of a batch reduce gradients and free gathered parameters."""
        if self._model is None:
            return
        self._model.set_requires_gradient_sync(is_last)
        self._model.set_is_last_backward(is_last)
        self._model.set_reshard_after_backward(is_last)
        if self._used_parameters is not None:
            self._used_parameters.is_syncing = is_last

    def is_own(self, name: str) -> bool:
        """Return whether this rank's stages save an entry of the model's state.

        They do not save buffers of other stages, nor tied weights, which the first stage saves.
        """
        blocks, _ = self._laid_out
        name = self.ties.get(name, name)
        return self.config.rank_of(blocks.buffers.stage_of(name)) == self._pipe.index

    def agree_on_buffers(self, reshaped: Collection[str]) -> list[str]:
        """Let all ranks know the buffers that changed in steps, so that `is_own` is alike. Collective.

        Args:
            reshaped: Names of buffers whose shape has changed here.

        Returns:
            Those of any stage.

        Raises:
            ModelError: Two stages change a buffer.
        """
        blocks, _ = self._laid_out
        blocks.agree(self._pipe.gather_objects)
        return sorted({name for names in self._pipe.gather_objects(list(reshaped)) for name in names})

    def check_microbatches(self, count: int) -> None:
        """Refuse a number of microbatches in a batch that the schedule does not take.

        Raises:
            ModelError: It is such.
        """
        _, schedule = self._laid_out
        schedule.check(count)

    @contextlib.contextmanager
    def skip_blocks(self) -> Iterator[None]:
        """Let forward passes skip the blocks, so that outputs have the right shapes and the wrong values.

        The pass needs no other stage, and leaves random generators and buffers as they were. An error of one
        rank is told to the others of its pipeline, which raise it in `check_skipped`.
        """
        with self._laid_out[0].checking(self._pipe.gather_objects):
            yield

    def check_skipped(self, results: Any) -> torch.Tensor:
        """Refuse a model that does not compute as its stages would, by a pass within `skip_blocks`.

        Args:
            results: The outputs and the loss of the pass.

        Returns:
            A tensor without values that has the shape and dtype of the activations between the blocks.

        Raises:
            ModelError: The model cannot be cut into stages, or the pass failed on another rank.
        """
        blocks, _ = self._laid_out
        blocks.check(results)
        blocks.agree(self._pipe.gather_objects)
        assert blocks.hidden is not None
        # Sharded blocks cast their input, and only the first stage has the first block.
        dtype = self._pipe.gather_objects(blocks.hidden.dtype)[0]
        return torch.empty_like(blocks.hidden, device="meta", dtype=dtype)

    def run_pipeline(
        self,
        microbatches: Sequence[Any],
        activations: torch.Tensor,
        loss_of: LossOf,
        forward_context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Run forward and backward passes on the microbatches of a batch, by the schedule. Collective.

        Args:
            microbatches: The same on all ranks, and of equal shapes.
            activations: The result of `check_skipped` for such a microbatch.
            loss_of: Called on the last stage with the outputs of a microbatch and its index; returns the loss
                to start the backward pass from.
            forward_context: Makes the context of each forward pass.

        Raises:
            ModelError: The microbatches are fewer than the schedule needs, or a block has changed a buffer
                outside of the blocks.
        """
        blocks, schedule = self._laid_out
        with blocks.stepping():
            schedule.run(microbatches, activations, loss_of, forward_context)
        if not self._has_run:  # here, since a stage that refuses within a batch has the others wait
            self._has_run = True
            blocks.agree(self._pipe.gather_objects)
        if self.data_parallel[1] > 1 and self._model is None:
            average_gradients(blocks.parameters, self._ranks.stage)
        if self._tied is not None:
            self._tied.add_gradients()

    def tell_from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the last stage on every rank. Collective."""
        told = values.to(self.device).contiguous()
        last = self.config.rank_of(self.config.num_stages - 1)
        dist.broadcast(told, self._pipe.ranks[last], group=self._pipe.on_device)
        return told

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients in place to a joint 2-norm over all stages of at most `max_norm`. Collective."""
        repeated = () if self._tied is None else self._tied.repeated
        return clip_grad_norm_(parameters, max_norm, over=self._pipe.on_device, uncounted=repeated)

    def reduce_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over the data-parallel ranks of this rank's stage, as for every layout."""
        return self._ranks.data.reduce_async(values)

    def check_generation(self, *, has_cache: bool) -> None:
        """Refuse to generate with a cache of keys, of which each stage would have a part, or cut sequences.

        Raises:
            ModelError: The model would.
        """
        has_context = self._ranks.context_parallel.degree > 1
        refuse_generation(has_context=has_context, has_parts=self._tensor_parallel.sequence_parallel)
        if has_cache:
            raise ModelError(
                "`generate` keeps a cache of keys, and with `pp` each stage has the keys of its own blocks. "
                "Pass `use_cache=False`, or leave `pp` out of `parallelism_config`"
            )

    def sync_gradients(self, model: nn.Module, when: bool) -> None:
        """Do nothing: each stage has the gradients of its own parameters, averaged once a batch."""

    def describe(self) -> str:
        """Describe the layout in one line."""
        pipeline = f"pipeline ({self.config.schedule}), {self.world_size} ranks: pp {self.config.degree}"
        axes = "".join(f" × {axis} {size}" for axis, size in self._ranks.axes.items() if size > 1)
        return f"{pipeline}{axes}; {self._described}"

    @property
    def _laid_out(self) -> tuple[StageBlocks, StageSchedule]:
        if self._blocks is None or self._schedule is None:
            raise ModelError("no model is laid out in stages. Call `lay_out` first")
        return self._blocks, self._schedule

    def close(self) -> None:
        """Leave the process group, if it was made here. Safe to call twice."""
        if self._loss_parallel is not None:
            self._loss_parallel.close()
            self._loss_parallel = None
        self._blocks = self._schedule = self._model = self._used_parameters = self._tied = None
        self._ranks.close()
        super().close()
