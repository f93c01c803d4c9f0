"""What a rank has and computes of a model: all of it, or its stages of a pipeline."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import nn

from hocket.dist.config.axes import CP, EP, TP
from hocket.dist.config.fsdp import FSDPConfig
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.layout.pipeline.stages import Stages
from hocket.dist.memory.activations import ForwardPass, Span
from hocket.dist.memory.estimate import GroupSize, group_sizes
from hocket.dist.memory.stage_orders import Step, peak_of
from hocket.dist.memory.tensor_traffic import ModuleTraffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a rank has and computes.

    Attributes:
        groups: Its groups of parameters, the root first.
        span: The figures of its blocks, for a microbatch.
        tensor: What it sends over `tp` for each of its modules, as often as these run for a microbatch.
        stages: The indices of its stages; empty without a pipeline.
        num_stages: Those of all ranks.
        num_sends: The activations and gradients that it sends to other stages, for a microbatch.
        tied_bytes: Bytes of the weights that it shares with a stage of another rank.
        by_stage: The figures of the blocks of each stage.
        given_by: Bytes of the outputs of a stage's layers that have parameters, for a microbatch, by stage.
        groups_of: The groups of parameters of each stage.
    """

    groups: Sequence[GroupSize]
    span: Span
    tensor: Sequence[ModuleTraffic] = ()
    stages: Sequence[int] = ()
    num_stages: int = 1
    num_sends: int = 0
    tied_bytes: int = 0
    by_stage: Mapping[int, Span] = field(default_factory=dict)
    given_by: Mapping[int, int] = field(default_factory=dict)
    groups_of: Mapping[int, Sequence[GroupSize]] = field(default_factory=dict)


def whole_share(
    model: nn.Module,
    config: FSDPConfig,
    forward: ForwardPass,
    tensor: Mapping[str, ModuleTraffic],
    stacks: Collection[str],
) -> Share:
    """Return the share of a rank without a pipeline.

    Args:
        model: What a rank of `tp` has of the model.
        config: The sharding.
        forward: The figures of its forward pass.
        tensor: What a rank sends over `tp` for each module.
        stacks: The names of the stacks of experts that ranks share.
    """
    groups = group_sizes(model, config, stacks=stacks)
    return Share(groups=groups, span=forward.whole, tensor=list(tensor.values()))


def stage_shares(
    model: nn.Module,
    config: FSDPConfig,
    forward: ForwardPass,
    tensor: Mapping[str, ModuleTraffic],
    stacks: Collection[str],
    *,
    pipeline: PipelineConfig,
    stages: Stages,
) -> list[Share]:
    """Return the share of each rank of a pipeline.

    Args:
        model: What a rank of `tp` has of the model.
        config: The sharding.
        forward: The figures of its forward pass.
        tensor: What a rank sends over `tp` for each module.
        stacks: The names of the stacks of experts that ranks share.
        pipeline: The pipeline.
        stages: Its stages.
    """
    names: list[set[str]] = [set() for _ in range(pipeline.num_stages)]
    for name in stages.stage_of:
        for stage in stages.holders(name):
            names[stage].add(name)
    blocks = list(stages.blocks)
    groups, spans = [], []
    for stage, own in enumerate(names):
        groups.append(group_sizes(model, config, keep=own.__contains__, stacks=stacks))
        spans.append(
            sum((forward.parts.get(blocks[index], Span()) for index in stages.own_blocks(stage)), Span())
        )
    given = [0] * len(names)
    for name, stage in stages.stage_of_module.items():
        if any(True for _ in model.get_submodule(name).parameters(recurse=False)):
            given[stage] += forward.passages[name].out if name in forward.passages else 0
    before = {*takewhile(lambda name: name != stages.list_name, stages.stage_of_module)}
    holders = {name: {stages.stage_of_entry(f"{name}.")} for name in tensor}
    for name in before & {*tensor}:  # a tied embedding is on the last stage, too
        for key, _ in model.get_submodule(name).named_parameters(prefix=name):
            holders[name] |= stages.holders(key)
    shares = []
    for rank in range(pipeline.degree):
        mine = pipeline.stages_of(rank)
        neighbors = [other for stage in mine for other in (stage - 1, stage + 1)]
        shares.append(
            Share(
                groups=group_sizes(
                    model,
                    config,
                    keep=set().union(*(names[stage] for stage in mine)).__contains__,
                    stacks=stacks,
                ),
                span=sum((spans[stage] for stage in mine), Span()),
                # What precedes the blocks runs in the passes of all stages of a rank.
                tensor=[
                    one
                    for name, one in tensor.items()
                    if not holders[name].isdisjoint(mine)
                    for _ in (mine if name in before else mine[:1])
                ],
                stages=mine,
                num_stages=len(names),
                tied_bytes=_tied_bytes(model, stages, mine),
                num_sends=sum(0 <= one < len(names) and pipeline.rank_of(one) != rank for one in neighbors),
                by_stage={stage: spans[stage] for stage in mine},
                given_by={stage: given[stage] for stage in mine},
                groups_of={stage: groups[stage] for stage in mine},
            )
        )
    return shares


def stage_activations(
    forward: ForwardPass,
    share: Share,
    steps: Sequence[Step],
    microbatches: int,
    sizes: Mapping[str, int],
    *,
    are_cut: bool = False,
) -> int:
    """Return the bytes of the activations of a rank of a pipeline, when they and the gradients take most.

    While the first microbatches are under way some gradients are not there yet, which the estimate counts
    from the beginning; they are left out of the result.

    Args:
        forward: The figures of the forward pass.
        share: The rank's stages.
        steps: The order in which it computes.
        microbatches: Those of a batch.
        sizes: The ranks along each axis.
        are_cut: Whether ranks of `tp` share the activations between the blocks.
    """
    context, last, boundary = sizes[CP], share.num_stages - 1, forward.boundary_bytes
    is_whole = context == 1 and not (are_cut and sizes[TP] > 1)
    outside = max(forward.whole.saved - sum(one.saved for one in forward.parts.values()), 0)
    saved, gradients, places = dict[int, int](), dict[int, int](), 0
    for stage in share.stages:
        # The activations that a stage has received are the input that its first block saves, unless that cuts
        # them. Those that it sends are kept until their backward pass.
        arrived = boundary * (stage > 0 and is_whole)
        saved[stage] = share.by_stage[stage].saved // context - arrived + boundary * (stage < last)
        saved[stage] += outside * (stage == last)
        gradients[stage] = sum(
            group.part(sizes[EP]).reduced if group.is_stack else group.reduced
            for group in share.groups_of[stage]
        )
        # Each microbatch has a place to receive its activations, and one for their gradients.
        places += boundary * microbatches * ((stage > 0) + (stage < last))
    # Until the gradients of the weights are computed, those of what the layers gave are kept. The first stage
    # computes both at once.
    kept = {stage: share.given_by[stage] // context for stage in share.stages if stage}
    most = peak_of(steps, saved, gradients, kept) - sum(gradients.values())
    return places + max(most, *saved.values())


def _tied_bytes(model: nn.Module, stages: Stages, own: Collection[int]) -> int:
    """Return the bytes of weights that are tied over a stage of these and another one."""
    holders = {name: stages.holders(name) for name in set(stages.ties.values())}
    tied = [model.get_parameter(name) for name, them in holders.items() if them & {*own} and them - {*own}]
    return sum(one.numel() * one.element_size() for one in tied)
