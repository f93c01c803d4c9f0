"""The best layouts of a model for some number of ranks, and the reasons for them in words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.dist.config.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from hocket.dist.config.context_parallel import ContextParallelConfig
from hocket.dist.config.parallelism import ParallelismConfig
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.config.tensor_parallel import TensorParallelConfig
from hocket.dist.errors import ConfigError, DistError
from hocket.dist.memory.layouts import LayoutEstimate, LayoutEstimator, Machines

_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers")
_WAITS = {
    "bubble": "waiting for other stages",
    PP: "sending activations to other stages",
    DP_REPLICATE: "adding up gradients over copies",
    DP_SHARD: "gathering parameters and adding up gradients",
    CP: "exchanging positions for heads",
    TP: "adding up the activations of cut matrices",
    EP: "sending rows to experts and back",
}
"""What a rank does in the time that it does not compute, in words."""
_INNER = (PP, CP, TP, EP)
"""The axes that not every model can have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The layouts that were estimated.

    Attributes:
        best: The best ones that fit, the best one first; of those that do not fit, the smallest if none does.
        fitting: The number of layouts that fit.
        estimated: The number of all.
        plain: All ranks under `dp_shard`.
        left_out: The axes that the model cannot have, each with the reason.
    """

    best: list[LayoutEstimate]
    fitting: int
    estimated: int
    plain: LayoutEstimate
    left_out: Mapping[str, str]


def propose(estimator: LayoutEstimator, memory: float | None, *, count: int = 3) -> Proposal:
    """Estimate every layout of a model, and return the best ones.

    Layouts that fit come in the order of the share of the time in which they compute; among equal ones, those
    with fewer axes, and then with less memory. Blocks are recomputed where a layout fits only so.

    Args:
        estimator: Of the model.
        memory: Bytes of a rank; None for any number.
        count: The number of layouts to return.
    """
    found: list[LayoutEstimate] = []
    reasons: dict[str, str] = {}
    used: set[str] = set()
    refused: set[tuple[str, int]] = set()
    never_together: set[frozenset[str]] = set()
    not_looped: list[int] = []
    for degrees, pipeline in layouts_of(estimator.machines, estimator.num_experts):
        axes = [axis for axis in _INNER if degrees[axis] > 1]
        if any((axis, degrees[axis]) in refused for axis in axes):
            continue
        if pipeline is not None and degrees[PP] in not_looped:
            continue
        if any(one <= {*axes} for one in never_together):
            continue
        try:
            one = estimator.estimate(degrees, pipeline=pipeline)
            if memory is not None and one.memory.total > memory and not one.config.activation_checkpointing:
                one = _checkpointed(estimator, degrees) or one
        except DistError as error:
            if pipeline is not None:
                if axes == [PP]:  # fewer blocks than stages, or microbatches that the schedule refuses
                    not_looped.append(degrees[PP])
                continue
            if len(axes) == 1:
                reasons.setdefault(axes[0], str(error))
                refused.add((axes[0], degrees[axes[0]]))
            elif not axes:
                reasons.setdefault(DP_SHARD, str(error))
            elif isinstance(error, ConfigError):
                never_together.add(frozenset(axes))
            continue
        used.update(axes)
        found.append(one)
    if not found:
        raise ConfigError("this model can have no layout: " + "; ".join(dict.fromkeys(reasons.values())))
    fitting = [one for one in found if memory is None or one.memory.total <= memory]
    ranked = sorted(fitting, key=_rank) or sorted(found, key=lambda one: one.memory.total)
    return Proposal(
        best=ranked[:count],
        fitting=len(fitting),
        estimated=len(found),
        plain=min(found, key=lambda one: (-one.degrees[DP_SHARD], sum(one.degrees.values()))),
        left_out={axis: reason for axis, reason in reasons.items() if axis not in used},
    )


def propose_only(estimator: LayoutEstimator, given: Mapping[str, Any], memory: float | None) -> Proposal:
    """Estimate one layout, beside all ranks under `dp_shard`.

    Args:
        estimator: Of the model.
        given: As a `parallelism_config`: the number of ranks along each axis, -1 for all that are left, and
            for `pp` a dict with its schedule and split.
        memory: Bytes of a rank; None for any number.

    Raises:
        ConfigError, ModelError: The model cannot have the layout, or a value is not estimated.
    """
    parallelism = ParallelismConfig.from_mapping(given)
    for name in ("fsdp", "fsdp2"):
        if given.get(name) is not None:
            raise ConfigError(
                f"`{name}` in `--parallelism-config` is {given[name]!r}. Give these keys in `--fsdp-config`"
            )
    tensor, context = parallelism.tp, parallelism.cp
    if tensor is not None or context is not None:
        estimator = estimator.with_settings(
            tensor or TensorParallelConfig(), context or ContextParallelConfig()
        )
    ranks = estimator.machines.ranks
    degrees = {**parallelism.degrees(ranks), EP: parallelism.expert_degree(ranks)}
    one = estimator.estimate(degrees, pipeline=parallelism.pipeline_of(ranks))
    fits = memory is None or one.memory.total <= memory
    plain = estimator.estimate({DP_SHARD: ranks})
    return Proposal(best=[one], fitting=int(fits), estimated=1, plain=plain, left_out={})


def layouts_of(
    machines: Machines, num_experts: int = 1
) -> Iterator[tuple[dict[str, int], PipelineConfig | None]]:
    """Yield the degrees of every layout of some ranks, those with few axes first.

    The ranks of `tp` are on one machine. Stages also come in two for each rank, by `Interleaved1F1B`.

    Args:
        machines: The ranks.
        num_experts: The largest number of ranks that can share the experts. Where none can, some layouts with
            `ep` are there all the same, and show the reason.
    """
    ranks, near = machines.ranks, math.gcd(machines.ranks, machines.ranks_each)
    inner = [
        (stages, context, tensor)
        for tensor in _divisors(near)
        for context in _divisors(ranks // tensor)
        for stages in _divisors(ranks // tensor // context)
    ]
    sharing = [one for one in _divisors(num_experts) if ranks % one == 0]
    if len(sharing) == 1:
        sharing = _divisors(ranks)[:2]
    made = [
        (stages, replicate, ranks // (stages * context * tensor * replicate), context, tensor, experts)
        for stages, context, tensor in inner
        for replicate in _divisors(ranks // (stages * context * tensor))
        for experts in sharing
    ]
    made = [sizes for sizes in made if sizes[2] * sizes[3] % sizes[5] == 0]
    # Stable, so that axes alone come before those beside others.
    made.sort(key=lambda sizes: sum(sizes[index] > 1 for index in (0, 3, 4, 5)))
    for sizes in made:
        degrees = dict(zip((PP, DP_REPLICATE, DP_SHARD, CP, TP, EP), sizes, strict=True))
        yield degrees, None
        if degrees[PP] > 1:
            yield degrees, PipelineConfig(degree=degrees[PP], schedule="Interleaved1F1B")


def _checkpointed(estimator: LayoutEstimator, degrees: Mapping[str, int]) -> LayoutEstimate | None:
    try:
        return estimator.estimate(degrees, checkpointing=True)
    except DistError:
        return None  # refused beside `pp`


def _rank(one: LayoutEstimate) -> tuple[float, int, float]:
    """Return the key by which layouts that fit are sorted, to a percent of the time."""
    axes = sum(degree > 1 for degree in one.degrees.values()) + one.config.activation_checkpointing
    axes += one.pipeline is not None and one.pipeline.stages_per_rank > 1
    return -round(one.share, 2), axes, one.memory.total


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def describe_proposal(found: Proposal, machines: Machines, memory: float | None) -> str:
    """Return the best layouts, each with its memory, its traffic and the reasons for it, as lines of text."""
    budget = "" if memory is None else f" and {memory / 2**30:g} GiB on each"
    fits = "" if memory is None else f", {found.fitting} of them fit"
    kinds = "1 layout" if found.estimated == 1 else f"{found.estimated} layouts"
    chosen = "best" if found.fitting else "smallest"
    lines = [
        f"{kinds} of {machines.ranks} ranks, {machines.ranks_each} on a machine{budget}{fits}"
        + (f". The {chosen}:" if found.estimated > 1 else ":")
    ]
    for index, one in enumerate(found.best, 1):
        lines += [f"{index}. {one.arguments}", *(f"   {line}" for line in _reasons(one, found, memory))]
    lines += [f"without `{axis}`: {reason}" for axis, reason in found.left_out.items()]
    lines.append(
        f"assumed: {machines.tflops:g} TFLOP/s a rank; {machines.inside:g} GB/s to ranks on its machine, "
        f"{machines.between:g} GB/s to others; gradients and parameters of data parallelism travel beside "
        "computing, all else waits"
        + ("; experts get equal numbers of rows" if any(one.degrees[EP] > 1 for one in found.best) else "")
    )
    return "\n".join(lines)


def _reasons(one: LayoutEstimate, found: Proposal, memory: float | None) -> Iterator[str]:
    """Yield the figures of a layout, and what speaks for it."""
    parts = [
        f"{name} {getattr(one.memory, name) / 2**30:.2f}" for name in _PARTS if getattr(one.memory, name)
    ]
    yield f"memory   {one.memory.total / 2**30:.2f} GiB: {', '.join(parts)}"
    sent = [
        f"`{axis}` {size / 2**30:.3g}{' between machines' if axis in one.crossing else ''}"
        for axis, size in one.sent.items()
    ]
    total = sum(one.sent.values()) / 2**30
    batches = "" if one.microbatches == 1 else f" of {one.microbatches} microbatches"
    yield f"traffic  {total:.3g} GiB sent by a rank in a step{batches}" + (
        f": {', '.join(sent)}" if sent else ""
    )
    yield f"why      {'; '.join(_why(one, found, memory))}"


def _why(one: LayoutEstimate, found: Proposal, memory: float | None) -> Iterator[str]:
    if memory is not None:
        left = (memory - one.memory.total) / 2**30
        yield f"fits with {left:.2f} GiB left" if left >= 0 else f"needs {-left:.2f} GiB more than there are"
    yield f"computes {one.share:.0%} of the time"
    total = sum(one.seconds.values())
    waits = {
        part: seconds for part, seconds in one.seconds.items() if part in _WAITS and seconds > 0.005 * total
    }
    for part in sorted(waits, key=lambda part: -waits[part])[:2]:
        yield f"{waits[part] / total:.0%} {_WAITS[part]}"
    if one.config.activation_checkpointing:
        yield "recomputes activations, without which it does not fit" if memory else "recomputes activations"
    if one.degrees == found.plain.degrees:
        yield f"all ranks under `{DP_SHARD}`"
    elif memory is not None and found.plain.memory.total > memory:
        yield f"all ranks under `{DP_SHARD}` would need {found.plain.memory.total / 2**30:.2f} GiB"
    else:
        how = ", with activations recomputed" if found.plain.config.activation_checkpointing else ""
        yield f"all ranks under `{DP_SHARD}` would compute {found.plain.share:.0%} of the time{how}"
