"""The best layouts of a model for some number of ranks, and the reasons for them in words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hocket.dist.config.parallelism import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP, ParallelismConfig
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
}
"""What a rank does in the time that it does not compute, in words."""


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
    for degrees in layouts_of(estimator.machines):
        axes = [axis for axis in (PP, CP, TP) if degrees[axis] > 1]
        if any((axis, degrees[axis]) in refused for axis in axes):
            continue
        try:
            one = estimator.estimate(degrees)
            if memory is not None and one.memory.total > memory and not one.config.activation_checkpointing:
                one = _checkpointed(estimator, degrees) or one
        except DistError as error:
            if len(axes) == 1:
                reasons.setdefault(axes[0], str(error))
                refused.add((axes[0], degrees[axes[0]]))
            elif not axes:
                reasons.setdefault(DP_SHARD, str(error))
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
        plain=max(found, key=lambda one: one.degrees[DP_SHARD]),
        left_out={axis: reason for axis, reason in reasons.items() if axis not in used},
    )


def propose_only(estimator: LayoutEstimator, given: Mapping[str, object], memory: float | None) -> Proposal:
    """Estimate one layout, beside all ranks under `dp_shard`.

    Args:
        estimator: Of the model.
        given: The number of ranks along each axis; -1 for all that are left.
        memory: Bytes of a rank; None for any number.

    Raises:
        ConfigError, ModelError: The model cannot have the layout, or a value is no number of ranks.
    """
    for axis, degree in given.items():
        if not isinstance(degree, int) or isinstance(degree, bool):
            raise ConfigError(
                f"`{axis}` in `--parallelism-config` is {degree!r}, and degrees alone are estimated. Give a "
                "number of ranks, and keys of `fsdp` in `--fsdp-config`"
            )
    if given.get(EP, 1) != 1:
        raise ConfigError(
            f"`{EP}` in `--parallelism-config` is {given[EP]}, and experts that ranks share are not estimated"
            f". Leave `{EP}` out for the memory of `{DP_SHARD}`, which shards experts as well"
        )
    ranks = estimator.machines.ranks
    one = estimator.estimate(ParallelismConfig.from_mapping(given).degrees(ranks))
    fits = memory is None or one.memory.total <= memory
    plain = estimator.estimate({DP_SHARD: ranks})
    return Proposal(best=[one], fitting=int(fits), estimated=1, plain=plain, left_out={})


def layouts_of(machines: Machines) -> Iterator[dict[str, int]]:
    """Yield the degrees of every layout of some ranks, those with few axes first.

    The ranks of `tp` are on one machine; `cp` and `tp` beside `pp` are not estimated.
    """
    ranks = machines.ranks
    inner = [(1, 1, 1), *((stages, 1, 1) for stages in _divisors(ranks) if stages > 1)]
    inner += [(1, context, 1) for context in _divisors(ranks) if context > 1]
    inner += [(1, 1, tensor) for tensor in _divisors(math.gcd(ranks, machines.ranks_each)) if tensor > 1]
    inner += [
        (1, context, tensor)
        for tensor in _divisors(math.gcd(ranks, machines.ranks_each))
        for context in _divisors(ranks // tensor)
        if tensor > 1 and context > 1
    ]
    for stages, context, tensor in inner:
        copies = ranks // (stages * context * tensor)
        for replicate in _divisors(copies):
            sizes = {PP: stages, DP_REPLICATE: replicate, DP_SHARD: copies // replicate}
            yield {**sizes, CP: context, TP: tensor}


def _checkpointed(estimator: LayoutEstimator, degrees: Mapping[str, int]) -> LayoutEstimate | None:
    try:
        return estimator.estimate(degrees, checkpointing=True)
    except DistError:
        return None  # refused beside `pp`


def _rank(one: LayoutEstimate) -> tuple[float, int, float]:
    """Return the key by which layouts that fit are sorted, to a percent of the time."""
    axes = sum(degree > 1 for degree in one.degrees.values()) + one.config.activation_checkpointing
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
