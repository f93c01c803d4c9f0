"""The schedule of a stage, run on one stage in one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.dist import provide
from hocket.dist.config.pipeline import PipelineConfig
from hocket.dist.layout.pipeline.schedule import StageSchedule

pytestmark = pytest.mark.skipif(torch.__version__ < "2.10", reason="`pp` needs torch 2.10")


class OnlyStage(nn.Module):
    """A stage whose gradient is the sum of its inputs."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *, index: Tensor) -> Tensor:
        number = int(index)
        return self.loss_of(self.weight * self.microbatches[number], number).reshape(1)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_batch_after_one_that_failed_has_its_own_gradients(name: str) -> None:
    def failing(outputs: Tensor, number: int) -> Tensor:
        if number == 2:
            raise ValueError("a failure")
        return outputs

    with provide({}, device="cpu", timeout_s=30):
        stage, passes = OnlyStage(), []
        schedule = StageSchedule(
            [stage],  # type: ignore[list-item]
            PipelineConfig(schedule=name),
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            before_backward=passes.append,
        )
        hidden = torch.zeros(())
        with pytest.raises(RuntimeError):
            schedule.run([torch.tensor(1.0)] * 4, hidden, failing, nullcontext)
        stage.weight.grad = None
        passes.clear()
        schedule.run([torch.tensor(10.0)] * 4, hidden, lambda outputs, number: outputs, nullcontext)
        assert stage.weight.grad is not None
        assert stage.weight.grad.item() == 40
        assert passes == [False, False, False, True]
