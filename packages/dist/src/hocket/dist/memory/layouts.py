"""The layouts that some number of ranks could have: memory, traffic and time of each, by arithmetic.

Nothing is started and no rank exists, so that thousands of ranks take as long as eight.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.parallelism import CP, DP_REPLICATE, DP_SHARD, PP, TP, ParallelismConfig
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.config.tensor_parallel import Plan, Style
from hocket.dist.errors import ConfigError, ModelError
from hocket.dist.layout.pipeline.stages import Stages, cut_stages
from hocket.dist.layout.sequence.attention import check_attention
from hocket.dist.layout.sequence.blocks import find_blocks
from hocket.dist.layout.tensor_parallelism.plans import check_sequence_heads
from hocket.dist.memory.activations import ForwardPass, measure_forward
from hocket.dist.memory.estimate import GroupSize, MemoryEstimate, group_sizes, memory_of_groups
from hocket.dist.memory.tensor_shares import tensor_share, tensor_traffic
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
    """

    degrees: Mapping[str, int]
    config: FSDPConfig
    memory: MemoryEstimate
    sent: Mapping[str, float]
    crossing: frozenset[str]
    microbatches: int
    seconds: Mapping[str, float]
    share: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The `parallelism_config` of the layout."""
        shown: dict[str, Any] = {axis: degree for axis, degree in self.degrees.items() if degree > 1}
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
        plan: The plan of tensor parallelism; None finds the model's own.
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
        plan: Plan | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer_slots: int = 2,
        microbatches: int = 1,
    ) -> None:
        self._model, self._batch, self.machines = model, batch, machines
        self._config = config or FSDPConfig()
        self._plan, self._loss = plan, loss
        self._slots, self._microbatches = optimizer_slots, microbatches
        # Many layouts ask for the same parts.
        self._shares: dict[tuple[int, bool], tuple[nn.Module, dict[str, Style], ForwardPass]] = {}
        self._cuts: dict[int, Stages] = {}
        self._groups: dict[tuple[int, int], list[list[GroupSize]]] = {}
        self._buffers = sum(one.numel() * one.element_size() for one in model.buffers())
        self._whole = self._share(1, self._config.activation_checkpointing)[2]

    def estimate(self, degrees: Mapping[str, int], *, checkpointing: bool = False) -> LayoutEstimate:
        """Estimate one layout.

        Args:
            degrees: The ranks along each axis; axes that are left out have one.
            checkpointing: Whether blocks are recomputed in backward.

        Raises:
            ConfigError, ModelError: The model cannot have this layout.
        """
        sizes = {axis: degrees.get(axis, 1) for axis in (PP, DP_REPLICATE, DP_SHARD, CP, TP)}
        parallelism = ParallelismConfig(
            pp=PipelineConfig(degree=sizes[PP]),
            dp_replicate=sizes[DP_REPLICATE],
            dp_shard=sizes[DP_SHARD],
            cp=ContextParallelConfig(degree=sizes[CP]),
            tp=None if sizes[TP] == 1 else {"degree": sizes[TP], "plan": self._plan},  # type: ignore[arg-type]
            fsdp=replace(
                self._config,
                data_parallel_shard_degree=-1,
                data_parallel_replicate_degree=None,
                activation_checkpointing=checkpointing or self._config.activation_checkpointing,
            ),
        )
        parallelism.degrees(self.machines.ranks)
        beside = [axis for axis in (CP, TP) if sizes[axis] > 1]
        if sizes[PP] > 1 and beside:
            raise ConfigError(
                f"`{beside[0]}` {sizes[beside[0]]} beside `{PP}` {sizes[PP]} trains, and is not estimated. "
                "Leave one of the two out for an estimate"
            )
        if parallelism.pipeline_of(self.machines.ranks) is None:
            config = parallelism.sharding(self.machines.ranks)
        else:
            config = parallelism.sharding_of_stages(self.machines.ranks) or replace(
                self._config, sharding_strategy="NO_SHARD"
            )
        if sizes[CP] > 1:
            self._check_context(sizes[CP], sizes[TP])
        microbatches = max(self._microbatches, sizes[PP] if sizes[PP] > 1 else 1)
        memory = self._memory(config, microbatches, **sizes)
        sent = self._traffic(config, microbatches, sizes)
        crossing = frozenset(self._crossing(sizes))
        seconds = self._seconds(config, microbatches, sizes, sent, crossing)
        alone = 3 * (self._whole.flops_inside + self._whole.flops_outside) * microbatches
        shared = sizes[PP] * sizes[CP] * sizes[TP]
        needed = alone / shared / self.machines.tflops / 1e12
        return LayoutEstimate(
            degrees=sizes,
            config=config,
            memory=memory,
            sent=sent,
            crossing=crossing,
            microbatches=microbatches,
            seconds=seconds,
            share=needed / sum(seconds.values()) if sum(seconds.values()) else 1.0,
        )

    def _share(self, tensor: int, checkpointing: bool) -> tuple[nn.Module, dict[str, Style], ForwardPass]:
        """Return what a rank of `tp` has of the model, the styles, and its forward pass."""
        if (tensor, checkpointing) not in self._shares:
            config = replace(self._config, activation_checkpointing=checkpointing)
            model, styles = (
                (self._model, {}) if tensor == 1 else tensor_share(self._model, self._plan, tensor)
            )
            try:
                forward = measure_forward(model, self._batch, config, loss=self._loss)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                if tensor == 1:
                    raise
                raise ModelError(
                    f"{type(self._model).__name__} does not compute with the share of its matrices that each "
                    f"of {tensor} ranks of `{TP}` has ({error}). A module that computes with its number of "
                    "heads must derive it from its input"
                ) from error
            self._shares[tensor, checkpointing] = model, styles, forward
        return self._shares[tensor, checkpointing]

    def _stages(self, degree: int) -> Stages:
        if degree not in self._cuts:
            self._cuts[degree] = cut_stages(self._model, PipelineConfig(degree=degree))
        return self._cuts[degree]

    def _groups_of(self, stages: int, tensor: int) -> list[list[GroupSize]]:
        """Return the groups of a rank; with stages, those of each stage."""
        if (stages, tensor) not in self._groups:
            model, _, _ = self._share(tensor, self._config.activation_checkpointing)
            if stages == 1:
                self._groups[stages, tensor] = [group_sizes(model, self._config)]
            else:
                cut = self._stages(stages)
                names = [
                    {name for name in cut.stage_of if stage in cut.holders(name)} for stage in range(stages)
                ]
                self._groups[stages, tensor] = [
                    group_sizes(model, self._config, keep=one.__contains__) for one in names
                ]
        return self._groups[stages, tensor]

    def _check_context(self, context: int, tensor: int) -> None:
        """Refuse a sequence that ranks cannot share, as training would."""
        find_blocks(self._model, f"`{CP}`")
        check_attention(self._model, CP)
        check_sequence_heads(self._model, ContextParallelConfig(degree=context), tensor)
        length = self._whole.boundary[1] if len(self._whole.boundary) > 1 else 0
        if length % context:
            raise ModelError(
                f"sequences of {length} positions cannot be shared evenly by {context} ranks of `{CP}`"
            )

    def _memory(self, config: FSDPConfig, microbatches: int, **sizes: int) -> MemoryEstimate:
        """Return the memory of a rank; with stages, of the stage that needs most."""
        shape = MeshShape(
            replicate=sizes[DP_REPLICATE], shard=sizes[DP_SHARD], context=sizes[CP], tensor=sizes[TP]
        )
        _, _, forward = self._share(sizes[TP], config.activation_checkpointing)
        inside = forward.inside // sizes[CP]
        activations = [inside + forward.outside + forward.recomputed // sizes[CP]]
        if sizes[PP] > 1:
            activations = self._activations_of_stages(forward, sizes[PP], microbatches)
        found = [
            memory_of_groups(
                groups,
                config,
                shape,
                activations=saved,
                optimizer_slots=self._slots,
                microbatches=microbatches,
                buffers=self._buffers,
            )
            for groups, saved in zip(self._groups_of(sizes[PP], sizes[TP]), activations, strict=True)
        ]
        if sizes[PP] > 1 and sizes[DP_SHARD] == 1:
            found = [
                replace(one, gathered=0) for one in found
            ]  # stages that are not sharded compute in place
        return max(found, key=lambda one: one.total)

    def _activations_of_stages(self, forward: ForwardPass, degree: int, microbatches: int) -> list[int]:
        """Return the bytes of the activations of each stage, with the schedule 1F1B."""
        stages, found = self._stages(degree), []
        for stage in range(degree):
            is_last = stage == degree - 1
            blocks = len(stages.own_blocks(stage)) / len(stages.blocks)
            # Microbatches between their forward and backward pass once there are gradients.
            waiting = min(degree - stage, max(microbatches - 1, 1))
            saved = math.ceil(forward.inside * blocks * waiting) + forward.outside * is_last
            # Each microbatch has a place to receive its activations, and one for their gradients.
            found.append(saved + forward.boundary_bytes * microbatches * ((stage > 0) + (not is_last)))
        return found

    def _traffic(self, config: FSDPConfig, microbatches: int, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, by axis."""
        tensor, context, stages = sizes[TP], sizes[CP], sizes[PP]
        _, styles, _ = self._share(tensor, config.activation_checkpointing)
        # With stages, gradients are reduced and parameters gathered once.
        times = 1 if stages > 1 else microbatches
        ranks, copies = sizes[DP_SHARD] * context, sizes[DP_REPLICATE]
        shard = copy = 0.0
        for groups in self._groups_of(stages, tensor):
            gathered = sum(group.gathered for group in groups)
            reduced = sum(group.reduced for group in groups)
            gathers = 2 if config.should_reshard else 1
            reductions = 1 if config.sync_policy == "last" else times
            shard = max(shard, (ranks - 1) / ranks * (gathered * gathers * times + reduced * reductions))
            reductions = times if config.sync_policy == "every" else 1
            copy = max(copy, 2 * (copies - 1) / copies * reduced / ranks * reductions)
        boundary = self._whole.boundary_bytes
        num_blocks = 0 if context == 1 else len(find_blocks(self._model, f"`{CP}`")[1])
        # Queries, keys, values and outputs change hands in each block, in both passes; the end is gathered.
        exchanged = (8 * num_blocks / context + 2) * boundary * (context - 1) / context
        along = {
            PP: (2.0 * boundary * microbatches + self._tied_bytes(stages) / ranks) if stages > 1 else 0.0,
            DP_REPLICATE: copy,
            DP_SHARD: shard,
            CP: exchanged * microbatches,
            TP: tensor_traffic(styles, self._whole.exchanged, tensor) / context * microbatches,
        }
        return {axis: sent for axis, sent in along.items() if sent}

    def _tied_bytes(self, stages: int) -> int:
        """Return the bytes of the gradients of weights that two stages share, which an all-reduce adds up."""
        tied = [self._model.get_parameter(name) for name in set(self._stages(stages).ties.values())]
        return sum(one.numel() * one.element_size() for one in tied)

    def _crossing(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield the axes whose ranks are on several machines; `cp` shares parameters with `dp_shard`."""
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
        sent: Mapping[str, float],
        crossing: frozenset[str],
    ) -> dict[str, float]:
        """Return the seconds of a step, by part."""
        _, _, forward = self._share(sizes[TP], config.activation_checkpointing)
        inside, outside = forward.flops_inside / sizes[CP], forward.flops_outside
        passes = 4 if config.activation_checkpointing else 3  # backward computes twice what forward does
        work = passes * inside + 3 * outside
        if sizes[PP] > 1:
            stages = self._stages(sizes[PP])
            last = sizes[PP] - 1
            work = max(
                passes * inside * len(stages.own_blocks(stage)) / len(stages.blocks)
                + 3 * outside * (stage == last)
                for stage in range(sizes[PP])
            )
        compute = work * microbatches / self.machines.tflops / 1e12
        speed = {axis: self.machines.between if axis in crossing else self.machines.inside for axis in sent}
        seconds = {axis: size / speed[axis] / 1e9 for axis, size in sent.items()}
        hidden = compute  # beside which gradients and parameters travel
        for axis in (DP_SHARD, DP_REPLICATE):
            if axis in seconds:
                seconds[axis], hidden = max(seconds[axis] - hidden, 0), max(hidden - seconds[axis], 0)
        return {"compute": compute, "bubble": compute * (sizes[PP] - 1) / microbatches, **seconds}
