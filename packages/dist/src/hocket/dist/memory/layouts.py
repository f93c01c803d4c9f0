"""The layouts that some number of ranks could have: memory, traffic and time of each, by arithmetic.

Nothing is started and no rank exists, so that thousands of ranks take as long as eight.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from hocket.dist.config.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.parallelism import ParallelismConfig
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.config.tensor_parallel import Style, TensorParallelConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.experts import find_experts
from hocket.dist.layout.pipeline.stages import Stages, cut_stages
from hocket.dist.memory.activations import ForwardPass, measure_forward
from hocket.dist.memory.estimate import MemoryEstimate, memory_of_groups
from hocket.dist.memory.layout_check import check_layout
from hocket.dist.memory.shares import Share, stage_activations, stage_shares, whole_share
from hocket.dist.memory.stage_orders import orders_of, seconds_of
from hocket.dist.memory.tensor_shares import tensor_share
from hocket.dist.memory.tensor_traffic import tensor_traffic
from hocket.dist.memory.traffic import traffic_of
from hocket.dist.ranks.mesh import MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The ranks of a job, and what they are assumed to do in a second.

    Attributes:
        ranks: All of them.
        ranks_each: Ranks on one machine.
        tflops: Floating-point operations of a rank, in 10¹².
        inside: Bytes that a rank sends to others on its machine, in 10⁹.
        between: Bytes that a rank sends to other machines, in 10⁹.
    """

    ranks: int
    ranks_each: int
    tflops: float = 400.0
    inside: float = 400.0
    between: float = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEstimate:
    """A layout, and what a rank of it needs for a training step.

    Attributes:
        degrees: The ranks along each axis.
        config: The sharding, with its levers.
        memory: Bytes at the peak, of the stage that needs most.
        sent: Bytes that a rank sends in a step, by axis.
        crossing: The axes whose ranks are on several machines.
        microbatches: Those of a step.
        seconds: Of a step, by part: `compute`, `bubble` (waiting for other stages) and each axis. The traffic
            of data parallelism goes on beside computing, and has only the part that is longer.
        share: The part of the time in which a rank does work that one process would do, too.
        pipeline: The stages; None for one.
        tensor: The plan of `tp`, and what its ranks share. Degrees are those of `degrees`, here and below.
        context: How ranks of `cp` attend.
    """

    degrees: Mapping[str, int]
    config: FSDPConfig
    memory: MemoryEstimate
    sent: Mapping[str, float]
    crossing: frozenset[str]
    microbatches: int
    seconds: Mapping[str, float]
    share: float
    pipeline: PipelineConfig | None = None
    tensor: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    context: ContextParallelConfig = field(default_factory=ContextParallelConfig)

    @property
    def arguments(self) -> dict[str, Any]:
        """The `parallelism_config` of the layout."""
        shown: dict[str, Any] = {axis: degree for axis, degree in self.degrees.items() if degree > 1}
        if self.degrees[EP] > 1:  # without them, there would be only as many ranks as `ep` needs
            shown = {DP_SHARD: self.degrees[DP_SHARD], **shown}
        if self.pipeline is not None and self.pipeline != PipelineConfig(degree=self.pipeline.degree):
            shown[PP] = {"degree": self.pipeline.degree, "schedule": self.pipeline.schedule}
            if self.pipeline.stages_per_rank > 1:
                shown[PP]["stages_per_rank"] = self.pipeline.stages_per_rank
            if self.pipeline.split is not None:
                shown[PP]["split"] = list(self.pipeline.split)
        for axis, given in ((TP, self.tensor), (CP, self.context)):
            settings = {
                one.name: value
                for one in fields(given)
                if one.name != "degree" and (value := getattr(given, one.name)) != one.default
            }
            if axis in shown and settings:
                shown[axis] = {"degree": shown[axis], **settings}
        if self.config.activation_checkpointing:
            shown["fsdp"] = {"activation_checkpointing": True}
        return shown or {DP_SHARD: 1}


class LayoutEstimator:
    """Estimates layouts of one model.

    Args:
        model: Plain, on the meta device or a real one.
        batch: One microbatch of a data-parallel rank.
        machines: The ranks.
        config: The settings of the sharding; degrees are ignored.
        tensor: The plan of `tp`, and what its ranks share; degrees are ignored, here and below.
        context: How ranks of `cp` attend.
        loss: `loss(outputs, batch)`; the model's own if it has one.
        optimizer_slots: Tensors of a parameter's size in the optimizer.
        microbatches: Microbatches of a step; with stages at least as many as there are stages.

    Raises:
        NotImplementedError: The forward reads values of tensors, which the meta device does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        machines: Machines,
        *,
        config: FSDPConfig | None = None,
        tensor: TensorParallelConfig | None = None,
        context: ContextParallelConfig | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer_slots: int = 2,
        microbatches: int = 1,
    ) -> None:
        self._model, self._batch, self.machines = model, batch, machines
        self._config = config or FSDPConfig()
        self._tensor, self._context = tensor or TensorParallelConfig(), context or ContextParallelConfig()
        self._loss = loss
        self._slots, self._microbatches = optimizer_slots, microbatches
        # Many layouts ask for the same parts.
        self._models: dict[int, tuple[nn.Module, dict[str, Style]]] = {}
        self._passes: dict[tuple[int, bool, bool], ForwardPass] = {}
        self._cuts: dict[Any, Stages] = {}
        self._shares: dict[Any, list[Share]] = {}
        self._stacks = find_experts(model)
        self._buffers = sum(one.numel() * one.element_size() for one in model.buffers())
        self._whole = self._pass(1, is_shared=False, checkpointing=self._config.activation_checkpointing)

    @property
    def num_experts(self) -> int:
        """The largest number of ranks that can share the experts of each stack; 1 without experts."""
        numbers = [int(one.num_experts) for one in self._stacks.values()]  # type: ignore[arg-type]
        return math.gcd(*numbers) if numbers else 1

    def estimate(
        self,
        degrees: Mapping[str, int],
        *,
        pipeline: PipelineConfig | None = None,
        checkpointing: bool = False,
    ) -> LayoutEstimate:
        """Estimate one layout.

        Args:
            degrees: The ranks along each axis; axes that are left out have one.
            pipeline: The schedule and the split of the stages; its degree is that of `degrees`.
            checkpointing: Whether blocks are recomputed in backward.

        Raises:
            ConfigError, ModelError: The model cannot have this layout.
        """
        sizes = {axis: degrees.get(axis, 1) for axis in (PP, DP_REPLICATE, DP_SHARD, CP, TP, EP)}
        parallelism = ParallelismConfig(
            pp=replace(pipeline or PipelineConfig(), degree=sizes[PP]),
            dp_replicate=sizes[DP_REPLICATE],
            dp_shard=sizes[DP_SHARD],
            cp=replace(self._context, degree=sizes[CP]),
            tp=None if sizes[TP] == 1 else replace(self._tensor, degree=sizes[TP]),
            ep=sizes[EP],
            fsdp=replace(
                self._config,
                data_parallel_shard_degree=-1,
                data_parallel_replicate_degree=None,
                activation_checkpointing=checkpointing or self._config.activation_checkpointing,
            ),
        )
        parallelism.degrees(self.machines.ranks)
        stages = parallelism.pipeline_of(self.machines.ranks)
        # Stages of one rank each, and copies of them, are not sharded.
        is_sharded = stages is None or any(sizes[axis] > 1 for axis in (DP_SHARD, CP, TP))
        config = parallelism.sharding(self.machines.ranks)
        if stages is not None:
            # Which schedules go with shards does not matter to whole stages.
            checked = parallelism if is_sharded else replace(parallelism, pp=PipelineConfig(degree=sizes[PP]))
            config = checked.sharding_of_stages(self.machines.ranks) or config
        if not is_sharded:
            config = replace(config, sharding_strategy="NO_SHARD", data_parallel_shard_degree=-1)
        boundary = self._whole.boundary
        check_layout(self._model, sizes, config, self._tensor, self._context, boundary=boundary)
        microbatches = max(self._microbatches, sizes[PP] if sizes[PP] > 1 else 1)
        memory = self._memory(config, microbatches, sizes, stages, is_sharded=is_sharded)
        sent = self._traffic(config, microbatches, sizes, stages)
        crossing = frozenset(self._crossing(sizes))
        seconds = self._seconds(config, microbatches, sizes, stages, sent, crossing)
        alone = 3 * self._whole.whole.flops * microbatches
        needed = alone / (sizes[PP] * sizes[CP] * sizes[TP]) / self.machines.tflops / 1e12
        return LayoutEstimate(
            degrees=sizes,
            config=config,
            memory=memory,
            sent=sent,
            crossing=crossing,
            microbatches=microbatches,
            seconds=seconds,
            share=needed / sum(seconds.values()) if sum(seconds.values()) else 1.0,
            pipeline=stages,
            tensor=self._tensor,
            context=self._context,
        )

    def with_settings(
        self, tensor: TensorParallelConfig, context: ContextParallelConfig
    ) -> "LayoutEstimator":
        """Return an estimator of the same model with other settings of `tp` and `cp`."""
        other = copy.copy(self)
        other._tensor, other._context = tensor, context
        other._models, other._passes, other._shares = {}, {}, {}
        return other

    def _model_of(self, tensor: int) -> tuple[nn.Module, dict[str, Style]]:
        """Return what a rank of `tp` has of the model, and the style of each module that is cut."""
        if tensor not in self._models:
            self._models[tensor] = (
                (self._model, {}) if tensor == 1 else tensor_share(self._model, self._tensor, tensor)
            )
        return self._models[tensor]

    def _pass(self, tensor: int, *, is_shared: bool, checkpointing: bool) -> ForwardPass:
        """Return the forward pass of what a rank of `tp` has, with experts that ranks share or not."""
        key = tensor, is_shared, checkpointing
        if is_shared and tensor > 1:
            # Each rank of `tp` has whole experts, which change by the exchange of rows as without it.
            plain, exchanging = (
                self._pass(1, is_shared=one, checkpointing=checkpointing) for one in (False, True)
            )
            share = self._pass(tensor, is_shared=False, checkpointing=checkpointing)
            return share.with_change(plain, exchanging)
        if key not in self._passes:
            config = _with_checkpointing(self._config, checkpointing)
            model, _ = self._model_of(tensor)
            try:
                self._passes[key] = measure_forward(
                    model, self._batch, config, loss=self._loss, exchanges_rows=is_shared
                )
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                if tensor == 1:
                    raise
                raise ModelError(
                    f"{type(self._model).__name__} does not compute with the share of its matrices that each "
                    f"of {tensor} ranks of `{TP}` has ({error}). A module that computes with its number of "
                    "heads must derive it from its input"
                ) from error
        return self._passes[key]

    def _pass_of(self, config: FSDPConfig, sizes: Mapping[str, int]) -> ForwardPass:
        return self._pass(
            sizes[TP], is_shared=sizes[EP] > 1, checkpointing=bool(config.activation_checkpointing)
        )

    def _shares_of(
        self, config: FSDPConfig, sizes: Mapping[str, int], pipeline: PipelineConfig | None
    ) -> list[Share]:
        """Return what a rank has; with stages, each rank of a pipeline."""
        key = sizes[TP], sizes[EP] > 1, pipeline
        if key not in self._shares:
            model, styles = self._model_of(sizes[TP])
            forward = self._pass(sizes[TP], is_shared=sizes[EP] > 1, checkpointing=False)
            stacks = list(self._stacks) if sizes[EP] > 1 else []
            tensor = tensor_traffic(
                self._model, styles, self._tensor, sizes[TP], whole=self._whole, sharding=self._config
            )
            common = model, self._config, forward, tensor, stacks
            self._shares[key] = (
                [whole_share(*common)]
                if pipeline is None
                else stage_shares(*common, pipeline=pipeline, stages=self._cut(pipeline))
            )
        return self._shares[key]

    def _cut(self, pipeline: PipelineConfig) -> Stages:
        key = pipeline.num_stages, pipeline.stages_per_rank, pipeline.split
        if key not in self._cuts:
            self._cuts[key] = cut_stages(self._model, pipeline)
        return self._cuts[key]

    def _memory(
        self,
        config: FSDPConfig,
        microbatches: int,
        sizes: Mapping[str, int],
        pipeline: PipelineConfig | None,
        *,
        is_sharded: bool,
    ) -> MemoryEstimate:
        """Return the memory of a rank; with stages, of the rank that needs most."""
        shape = MeshShape(
            replicate=sizes[DP_REPLICATE], shard=sizes[DP_SHARD], context=sizes[CP], tensor=sizes[TP]
        )
        forward = self._pass_of(config, sizes)
        inside = (forward.inside + forward.recomputed) // sizes[CP]
        shares = self._shares_of(config, sizes, pipeline)
        activations = [inside + forward.outside]
        if pipeline is not None:
            activations = [
                stage_activations(
                    forward, share, steps, microbatches, sizes, are_cut=self._tensor.sequence_parallel
                )
                for share, steps in zip(shares, orders_of(pipeline, microbatches), strict=True)
            ]
        found = [
            memory_of_groups(
                share.groups,
                config,
                shape,
                activations=saved,
                optimizer_slots=self._slots,
                microbatches=microbatches,
                buffers=self._buffers,
                experts=sizes[EP],
            )
            for share, saved in zip(shares, activations, strict=True)
        ]
        if not is_sharded:
            found = [replace(one, gathered=0) for one in found]  # they compute in place
        return max(found, key=lambda one: one.total)

    def _traffic(
        self,
        config: FSDPConfig,
        microbatches: int,
        sizes: Mapping[str, int],
        pipeline: PipelineConfig | None,
    ) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, by axis; with stages, of the rank that sends most."""
        found = [
            traffic_of(
                share,
                config,
                sizes,
                microbatches=microbatches,
                whole=self._whole,
                tensor_parallel=self._tensor,
                context_parallel=self._context,
            )
            for share in self._shares_of(config, sizes, pipeline)
        ]
        axes = dict.fromkeys(axis for one in found for axis in one)
        return {axis: max(one.get(axis, 0.0) for one in found) for axis in axes}

    def _crossing(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield the axes whose ranks are on several machines; `cp` shares parameters with `dp_shard`."""
        if sizes[EP] > 1 and sizes[TP] * sizes[EP] > self.machines.ranks_each:
            yield EP
        inside = 1
        for axis in (TP, CP, DP_SHARD, DP_REPLICATE, PP):
            inside *= sizes[axis]
            is_used = sizes[axis] > 1 or (axis == DP_SHARD and sizes[CP] > 1)
            if is_used and inside > self.machines.ranks_each:
                yield axis

    def _seconds(
        self,
        config: FSDPConfig,
        microbatches: int,
        sizes: Mapping[str, int],
        pipeline: PipelineConfig | None,
        sent: Mapping[str, float],
        crossing: frozenset[str],
    ) -> dict[str, float]:
        """Return the seconds of a step, by part."""
        forward, bubble = self._pass_of(config, sizes), 0.0
        passes = 4 if config.activation_checkpointing else 3  # backward computes twice what forward does
        work = passes * forward.flops_inside / sizes[CP] + 3 * forward.flops_outside
        compute = work * microbatches / self.machines.tflops / 1e12
        if pipeline is not None:
            shares = self._shares_of(config, sizes, pipeline)
            outside = forward.whole.flops - sum(one.flops for one in forward.parts.values())
            stages = {
                stage: span.flops / sizes[CP] + outside * (stage == pipeline.num_stages - 1)
                for share in shares
                for stage, span in share.by_stage.items()
            }
            flops = max(sum(stages[stage] for stage in share.stages) for share in shares)
            compute = 3 * flops * microbatches / self.machines.tflops / 1e12
            each = [stages[stage] / self.machines.tflops / 1e12 for stage in sorted(stages)]
            bubble = max(seconds_of(pipeline, microbatches, each) - compute, 0.0)
        speed = {axis: self.machines.between if axis in crossing else self.machines.inside for axis in sent}
        seconds = {axis: size / speed[axis] / 1e9 for axis, size in sent.items()}
        hidden = compute  # beside which gradients and parameters travel
        for axis in (DP_SHARD, DP_REPLICATE):
            if axis in seconds:
                seconds[axis], hidden = max(seconds[axis] - hidden, 0), max(hidden - seconds[axis], 0)
        return {"compute": compute, "bubble": bubble, **seconds}


def _with_checkpointing(config: FSDPConfig, is_on: bool) -> FSDPConfig:
    """Return a config with activation checkpointing on or off; off, it has no number and no operators."""
    if is_on:
        return replace(config, activation_checkpointing=True)
    return replace(
        config,
        activation_checkpointing=False,
        activation_checkpointing_every=1,
        activation_checkpointing_save_ops=(),
    )
