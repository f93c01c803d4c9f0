"""The order in which a rank of a pipeline computes, and the memory and the time that it leads to."""

import functools
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.errors import ModelError

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
"""A pass as torch writes it: the stage, the kind and the microbatch."""


class Step(NamedTuple):
    """One pass of a stage on one microbatch.

    Attributes:
        kind: `F` for forward, `B` for backward; `I` for the gradients of the activations alone, and `W` for
            those of the weights.
        stage: The index of the stage.
        microbatch: The index of the microbatch.
    """

    kind: str
    stage: int
    microbatch: int


def orders_of(config: PipelineConfig, microbatches: int) -> list[list[Step]]:
    """Return the steps of each rank of a pipeline, without the waits between them.

    Raises:
        ModelError: The schedule does not take this number of microbatches.
    """
    return _orders(config.schedule, config.degree, config.stages_per_rank, microbatches)


@functools.lru_cache(maxsize=64)
def _orders(schedule: str, degree: int, per_rank: int, microbatches: int) -> list[list[Step]]:
    if schedule == "GPipe":
        ahead = [microbatches] * degree
    elif schedule == "1F1B":
        if microbatches < degree:
            raise ModelError(
                f"a batch has {microbatches} microbatches and `pp` has {degree} stages: the schedule '1F1B' "
                f"needs at least {degree} microbatches. Set `--microbatches` {degree}"
            )
        ahead = [degree - rank for rank in range(degree)]
    else:
        return _looped(schedule, degree, per_rank, microbatches)
    orders = []
    for rank, count in enumerate(ahead):
        steps = [Step("F", rank, number) for number in range(count)]
        for number in range(microbatches):
            steps.append(Step("B", rank, number))
            if number + count < microbatches:
                steps.append(Step("F", rank, number + count))
        orders.append(steps)
    return orders


def _looped(schedule: str, degree: int, per_rank: int, microbatches: int) -> list[list[Step]]:
    """Return the steps of torch's schedule, which knows them without any process group."""
    stages = [
        SimpleNamespace(
            stage_index=turn * degree,
            num_stages=degree * per_rank,
            group_size=degree,
            group_rank=0,
            is_first=not turn,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for turn in range(per_rank)
    ]
    make: Any = get_schedule_class(schedule)
    try:
        order = make(stages, microbatches, loss_fn=lambda output, _: output, scale_grads=False).pipeline_order
    except ValueError as error:
        raise ModelError(
            f"a batch has {microbatches} microbatches and `pp` has {degree * per_rank} stages on {degree} "
            f"ranks, which torch's schedule '{schedule}' refuses: {str(error).rstrip('.')}. Set another "
            "`--microbatches`"
        ) from error
    return [[step for action in order[rank] for step in _steps_of(action)] for rank in range(degree)]


def _steps_of(action: Any) -> list[Step]:
    if action is None:
        return []
    if (both := getattr(action, "sub_actions", None)) is not None:
        return [step for one in both for step in _steps_of(one)]
    found = _ACTION.fullmatch(str(action))
    return [Step(found[2], int(found[1]), int(found[3]))] if found else []


def peak_of(
    steps: Sequence[Step],
    saved: Mapping[int, int],
    gradients: Mapping[int, int],
    kept: Mapping[int, int] | None = None,
) -> int:
    """Return the most bytes that activations and gradients take together on a rank.

    Args:
        steps: Those of the rank.
        saved: Bytes that each of its stages saves for a microbatch.
        gradients: Bytes of the gradients of each of its stages, which its first backward pass makes.
        kept: Bytes that each keeps for a microbatch from the pass `I` to the pass `W`.
    """
    held = most = 0
    made: set[int] = set()
    kept = kept or {}
    for kind, stage, _ in steps:
        if kind == "F":
            held += saved[stage]
        elif kind == "I":
            held += kept.get(stage, 0)
        else:
            held -= saved[stage] + (kept.get(stage, 0) if kind == "W" else 0)
            made.add(stage)
        most = max(most, held + sum(gradients[one] for one in made))
    return most


def seconds_of(config: PipelineConfig, microbatches: int, forward: Sequence[float]) -> float:
    """Return the time of all passes, if a backward pass takes twice as long as a forward pass.

    Args:
        config: The pipeline.
        microbatches: Those of a batch.
        forward: Seconds of a forward pass of each stage.

    Raises:
        ModelError: The schedule does not take this number of microbatches.
    """
    longest = max(forward)
    if not longest:
        return 0.0
    costs = tuple(round(one / longest, 3) for one in forward)
    return longest * _length(config.schedule, config.degree, config.stages_per_rank, microbatches, costs)


@functools.lru_cache(maxsize=256)
def _length(
    schedule: str, degree: int, per_rank: int, microbatches: int, forward: tuple[float, ...]
) -> float:
    orders = _orders(schedule, degree, per_rank, microbatches)
    last = len(forward) - 1
    done: dict[Step, float] = {}
    places, now = [0] * len(orders), [0.0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, steps in enumerate(orders):
            while places[rank] < len(steps):
                step = steps[places[rank]]
                ready = _ready(step, done, last)
                if ready is None:
                    break
                length = forward[step.stage] * (2 if step.kind == "B" else 1)
                now[rank] = max(now[rank], ready) + length
                done[step] = now[rank]
                if step.kind == "I":
                    done[Step("B", *step[1:])] = now[rank]
                places[rank] += 1
                is_moving = True
    return max(now)


def _ready(step: Step, done: Mapping[Step, float], last: int) -> float | None:
    """Return the time from which a step can run; None if what it needs has not run."""
    kind, stage, microbatch = step
    if kind == "F":
        return done.get(Step("F", stage - 1, microbatch)) if stage else 0.0
    if kind == "W":
        return done.get(Step("I", stage, microbatch))
    return done.get(Step("F", stage, microbatch) if stage == last else Step("B", stage + 1, microbatch))
