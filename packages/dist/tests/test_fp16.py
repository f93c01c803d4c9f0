"""fp16 with sharded gradients: after an overflow on one rank, all ranks skip the step."""

from typing import Any

import pytest
import torch

from hocket.dist import ConfigError, provide
from hocket.trainer import Callback
from support.standing_ranks import StandingRanks
from support.training import make


class Overflow(Callback):
    """Makes a gradient of rank 1 infinite in the first step, and records scale and weights after each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: list[torch.Tensor] = []

    def after_backward(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch.value == 0 and state.parallelism.global_rank == 1:
            gradient = state.model.get_parameter(self.name).grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("inf")

    def batch_end(self, state: Any, logger: Any) -> None:
        weight = state.model.get_parameter("layers.3.weight")
        self.weights.append(weight.full_tensor().detach().clone())


def _train() -> tuple[list[torch.Tensor], float]:
    overflow = Overflow("layers.3.weight")
    with make(max_duration="2ba", precision="amp_fp16", fsdp_config={}, callbacks=overflow) as trainer:
        before = trainer.state.model.get_parameter("layers.3.weight").full_tensor().detach().clone()
        trainer.fit()
        return [before, *overflow.weights], trainer._run.precision.state_dict()["scale"]


def test_an_overflow_on_one_rank_is_skipped_on_all(two_ranks: StandingRanks) -> None:
    for (before, first, second), scale in two_ranks.run(_train):
        assert torch.equal(before, first), "the step with an infinite gradient was taken"
        assert not torch.equal(first, second)
        assert torch.isfinite(second).all()
        assert scale == 2.0**16 / 2, "the scale was not halved"


def test_unsharded_modules_raise() -> None:
    with pytest.raises(ConfigError, match=r"'layers.0'.* and `precision` is 'amp_fp16'"):
        provide({"ignored_modules": ["layers.0"]}, device="cpu", precision="amp_fp16")
