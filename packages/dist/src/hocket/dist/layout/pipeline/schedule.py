"""One training batch through the stages, by a schedule of `torch.distributed.pipelining`."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from hocket.dist.config.pipeline import ONE_STAGE, PipelineConfig
from hocket.dist.errors import ModelError
from hocket.dist.layout.pipeline.blocks import Stage
from hocket.dist.ranks.process_group import RankGroup

_BUCKET_BYTES = 25 * 2**20

LossOf = Callable[[Any, int], torch.Tensor]


class _CountedStage(PipelineStage):
    """A stage that calls `before_backward` before each of its backward passes."""

    def watch(self, before_backward: Callable[[], None]) -> None:
        self._before_backward = before_backward

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._before_backward()
        return super().backward_one_chunk(*args, **kwargs)


class _PassCount:
    """Counts the backward passes of a rank's stages, and tells before each whether it is a batch's last."""

    def __init__(self, tell: Callable[[bool], None], num_passes: int) -> None:
        self._tell, self._num_passes, self._passed = tell, num_passes, 0

    def __call__(self) -> None:
        self._passed += 1
        self._tell(self._passed % self._num_passes == 0)


class StageSchedule:
    """The schedule of a rank's stages, made for each shape of activations and number of microbatches.

    Args:
        stages: The modules of this rank's stages, in order.
        config: The pipeline, with torch's name of the schedule.
        device: The device of the stages.
        group: The ranks of the pipeline.
        before_backward: Called before each backward pass, with whether it is the last one of a batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        config: PipelineConfig,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None,
        before_backward: Callable[[bool], None],
    ) -> None:
        self._stages, self._config = stages, config
        self._device, self._group, self._before_backward = device, group, before_backward
        self._made: dict[Any, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self._stages[-1].number == self._config.num_stages - 1

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
        key = (len(microbatches), tuple(hidden.shape), hidden.dtype)
        schedule = self._made.get(key)
        if schedule is None:
            self._made[key] = schedule = self._make(len(microbatches), hidden)
        index = torch.arange(len(microbatches), device="cpu")
        for stage in self._stages:
            stage.microbatches, stage.forward_context = list(microbatches), forward_context
            is_last = stage.number == self._config.num_stages - 1
            stage.loss_of = loss_of if is_last else None
        try:
            schedule.step(index=index, **({"target": index} if self.is_last else {}))
        except BaseException:
            # Torch's schedule keeps the losses of a batch that failed, and the stage its count of passes.
            del self._made[key]
            raise
        finally:
            for stage in self._stages:
                stage.microbatches, stage.loss_of = [], None

    def check(self, num_microbatches: int) -> None:
        """Refuse a number of microbatches that the schedule does not take. No communication.

        Raises:
            ModelError: It is such.
        """
        self._make(num_microbatches, torch.empty(1, device=self._device))

    def _make(self, num_microbatches: int, hidden: torch.Tensor) -> Any:
        name, count, degree = self._config.schedule, self._config.num_stages, self._config.degree
        if num_microbatches < degree and name == "1F1B":
            raise ModelError(
                f"a batch has {num_microbatches} microbatches and `pp` has {degree} stages: the "
                f"schedule '1F1B' needs at least {degree} microbatches. Set a smaller "
                "`device_train_microbatch_size`, or use the schedule 'GPipe'"
            )
        like = torch.empty(hidden.shape, dtype=hidden.dtype, device=self._device, requires_grad=True)
        end = torch.empty(1, device=self._device, requires_grad=True)
        passes = _PassCount(self._before_backward, num_microbatches * len(self._stages))
        made = []
        for stage in self._stages:
            counted = _CountedStage(
                stage,
                stage.number,
                count,
                self._device,
                input_args=() if stage.number == 0 else (like,),
                output_args=(end,) if stage.number == count - 1 else (like,),
                group=self._group,
            )
            counted.watch(passes)
            made.append(counted)
        make: Any = get_schedule_class(name)
        given = made[0] if name in ONE_STAGE else made
        try:
            return make(given, num_microbatches, loss_fn=_only, scale_grads=False)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ModelError(
                f"a batch has {num_microbatches} microbatches and `pp` has {count} stages on "
                f"{self._config.degree} ranks, which torch's schedule '{name}' refuses: {reason}. Set "
                "another `device_train_microbatch_size`, or use the schedule 'GPipe', which takes any number"
            ) from error


def average_gradients(parameters: Iterable[nn.Parameter], copies: RankGroup) -> None:
    """Replace the gradients of a stage by their means over its copies. Collective.

    A parameter that no copy used has no gradient afterwards; one that some used gets zeros from the others.

    Args:
        parameters: Those of the stage, in the same order on every copy.
        copies: The ranks that have this stage.
    """
    trained = [one for one in parameters if one.requires_grad]
    is_used = torch.tensor([one.grad is not None for one in trained], dtype=torch.float64, device="cpu")
    used = copies.reduce_async(is_used).wait().tolist()
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, count in zip(trained, used, strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        bucket = buckets.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(one.nbytes for one in bucket) >= _BUCKET_BYTES:
            _average(buckets.pop((gradient.dtype, gradient.device)), copies)
    for bucket in buckets.values():
        _average(bucket, copies)


def _average(gradients: list[torch.Tensor], copies: RankGroup) -> None:
    flat = torch.cat([one.flatten() for one in gradients]).div_(len(copies.ranks))
    dist.all_reduce(flat, group=copies.on_device)
    means = torch.split(flat, [one.numel() for one in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def _only(loss: torch.Tensor, _index: torch.Tensor) -> torch.Tensor:
    return loss.sum()
