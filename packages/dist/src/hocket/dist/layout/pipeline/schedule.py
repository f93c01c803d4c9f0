"""One training batch through the stages, by a schedule of `torch.distributed.pipelining`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from hocket.dist.errors import ModelError
from hocket.dist.layout.pipeline.blocks import Stage

LossOf = Callable[[Any, int], torch.Tensor]


class StageSchedule:
    """The schedule of a stage, made for each shape of activations and number of microbatches.

    Args:
        stage: The module of this stage.
        name: Torch's name of the schedule.
        place: The index of the stage, and the number of stages.
        device: The device of the stage.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        *,
        place: tuple[int, int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._stage, self._name, self._place = stage, name, place
        self._device, self._group = device, group
        self._made: dict[Any, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self._place[0] == self._place[1] - 1

    def run(
        self,
        microbatches: Sequence[Any],
        hidden: torch.Tensor,
        loss_of: LossOf,
        forward_context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Run forward and backward passes on all microbatches. Collective.

        Args:
            microbatches: Of equal shapes.
            hidden: A tensor with the shape and dtype of a microbatch's activations.
            loss_of: Called at the last stage with the outputs of a microbatch and its index; returns the loss
                to start the backward pass from.
            forward_context: Makes the context of each forward pass, such as autocast.
        """
        if len(microbatches) < self._place[1] and self._name == "1F1B":
            raise ModelError(
                f"a batch has {len(microbatches)} microbatches and `pp` has {self._place[1]} stages: the "
                f"schedule '1F1B' needs at least {self._place[1]} microbatches. Set a smaller "
                "`device_train_microbatch_size`, or use the schedule 'GPipe'"
            )
        key = (len(microbatches), tuple(hidden.shape), hidden.dtype)
        schedule = self._made.get(key)
        if schedule is None:
            self._made[key] = schedule = self._make(len(microbatches), hidden)
        index = torch.arange(len(microbatches), device="cpu")
        self._stage.microbatches = list(microbatches)
        self._stage.forward_context = forward_context
        self._stage.loss_of = loss_of if self.is_last else None
        try:
            schedule.step(index=index, **({"target": index} if self.is_last else {}))
        finally:
            self._stage.microbatches, self._stage.loss_of = [], None

    def _make(self, num_microbatches: int, hidden: torch.Tensor) -> Any:
        number, count = self._place
        like = torch.empty(hidden.shape, dtype=hidden.dtype, device=self._device, requires_grad=True)
        end = torch.empty(1, device=self._device, requires_grad=True)
        stage = PipelineStage(
            self._stage,
            number,
            count,
            self._device,
            input_args=() if number == 0 else (like,),
            output_args=(end,) if self.is_last else (like,),
            group=self._group,
        )
        make: Any = get_schedule_class(self._name)
        return make(stage, num_microbatches, loss_fn=_only, scale_grads=False)


def _only(loss: torch.Tensor, _index: torch.Tensor) -> torch.Tensor:
    return loss.sum()
