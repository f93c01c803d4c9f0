"""The order of a pipeline's passes is that of torch's schedules, and so are the peak and the time."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from hocket.dist.config.pipeline import SCHEDULES, PipelineConfig
from hocket.dist.errors import ModelError
from hocket.dist.memory.stage_orders import Step, orders_of, peak_of, seconds_of
from support.stages import NEEDS_TORCH


@NEEDS_TORCH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_microbatch_passes_each_stage_forward_and_backward_once(schedule: str) -> None:
    config = PipelineConfig(degree=4, schedule=schedule)
    for rank, steps in enumerate(orders_of(config, 8)):
        assert {step.stage for step in steps} == {*config.stages_of(rank)}
        for stage in config.stages_of(rank):
            for number in range(8):
                kinds = "".join(step.kind for step in steps if step[1:] == (stage, number))
                assert kinds in ("FB", "FIW"), (rank, stage, number)


@NEEDS_TORCH
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_orders_of_one_stage_are_those_of_torch(schedule: str) -> None:
    for rank, steps in enumerate(orders_of(PipelineConfig(degree=4, schedule=schedule), 6)):
        stage = SimpleNamespace(stage_index=rank, num_stages=4, group_size=4, group_rank=rank)
        make: Any = get_schedule_class(schedule)
        actions = map(str, make(stage, 6, loss_fn=lambda output, _: output)._get_pipeline_order()[rank])
        # Torch numbers the microbatches of this picture of 1F1B in another way than it runs them.
        kinds = [found[1] for one in actions if (found := re.fullmatch(r"\d+([FB])\d+", one))]
        assert [step.kind for step in steps] == kinds


def test_the_peak_counts_microbatches_under_way_and_gradients_once_they_are_there() -> None:
    orders = orders_of(PipelineConfig(degree=4), 8)
    for rank, steps in enumerate(orders):
        assert peak_of(steps, {rank: 10}, {rank: 1}) == 10 * (4 - rank) + 1
    # With as many microbatches as stages, the first rank never has all activations beside gradients.
    assert peak_of(orders_of(PipelineConfig(degree=4), 4)[0], {0: 10}, {0: 1}) == 40
    assert peak_of(orders_of(PipelineConfig(degree=4), 4)[0], {0: 10}, {0: 100}) == 130
    assert peak_of(orders_of(PipelineConfig(degree=4, schedule="GPipe"), 8)[3], {3: 10}, {3: 1}) == 80


@NEEDS_TORCH
def test_several_stages_of_a_rank_hold_more_and_wait_less() -> None:
    plain, looped = (PipelineConfig(degree=4, schedule=name) for name in ("1F1B", "Interleaved1F1B"))
    # Eleven of the half stages: seven microbatches of the first one, four of the second one.
    assert peak_of(orders_of(looped, 8)[0], {0: 5, 4: 5}, {0: 0, 4: 0}) == 55
    assert peak_of(orders_of(plain, 8)[0], {0: 10}, {0: 0}) == 40
    assert seconds_of(plain, 8, [1.0] * 4) == pytest.approx(3 * (8 + 3))
    assert seconds_of(looped, 8, [0.5] * 8) == pytest.approx(3 * (8 + 3 / 2))
    split = PipelineConfig(degree=4, schedule="ZBVZeroBubble")
    assert seconds_of(split, 8, [0.5] * 8) < seconds_of(looped, 8, [0.5] * 8)


def test_the_peak_counts_what_is_kept_until_the_gradients_of_weights_are_computed() -> None:
    steps = [Step(kind, 1, number) for kind, number in zip("FFIIWW", (0, 1, 0, 1, 0, 1), strict=True)]
    assert peak_of(steps, {1: 10}, {1: 1}) == 20
    assert peak_of(steps, {1: 10}, {1: 1}, {1: 4}) == 28
    assert peak_of(steps, {1: 10}, {1: 100}, {1: 4}) == 114


@NEEDS_TORCH
def test_a_number_of_microbatches_that_a_schedule_does_not_take_is_refused() -> None:
    with pytest.raises(ModelError, match="'1F1B' needs at least 4 microbatches"):
        orders_of(PipelineConfig(degree=4), 3)
    with pytest.raises(ModelError, match=r"'Interleaved1F1B' refuses: .*multiple of the number of rounds"):
        orders_of(PipelineConfig(degree=4, schedule="Interleaved1F1B"), 9)
