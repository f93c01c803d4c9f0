"""`PipelineStep`: a step whose microbatches go through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.data.loader_checks import known_batch_size
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.models.base import LossSum
from hocket.trainer.optim import needs_closure
from hocket.trainer.protocols import Pipelined
from hocket.trainer.step.accumulation import LossMean, Microbatch, Weight, microbatches, weight_of
from hocket.trainer.step.losses.losses import total_of
from hocket.trainer.step.step import StandardStep, StepContext

_EVENTS = (
    "before_forward",
    "after_forward",
    "before_loss",
    "after_loss",
    "before_backward",
    "after_backward",
)
"""The events of a microbatch, of which each stage sees a part."""


class PipelineStep(StandardStep):
    """The step of a model in stages.

    Every rank gets the same microbatches. The first stage feeds them to the model, the last one computes
    their losses and tells them to all. Before the first batch of each shape, every rank runs one pass that
    skips the blocks: it finds the rule of the loss's weights, and whether the model can be cut.

    Args:
        context: The parts of the run.
        unsupported: Settings of the trainer that are set and do not work with a pipeline.

    Raises:
        TrainerConfigError: A setting, an algorithm or an optimizer does not work with a pipeline.
    """

    def __init__(self, context: StepContext, *, unsupported: Iterable[str] = ()) -> None:
        super().__init__(context)
        assert isinstance(context.state.parallelism, Pipelined)
        self._pipeline: Pipelined = context.state.parallelism
        self._activations: dict[Any, torch.Tensor] = {}
        self._gives_sums = False
        state = context.state
        for name in unsupported:
            raise _refusal(f"`{name}`")
        for algorithm in state.algorithms:
            raise _refusal(f"the algorithm `{type(algorithm).__name__}`")
        for optimizer in state.optimizers:
            if needs_closure(optimizer):
                raise _refusal(f"`{type(optimizer).__name__}`, which evaluates the loss within its step,")

    def check_batches(self, loader: Any) -> None:
        """Refuse batches of a known size whose microbatches the schedule does not take, before the first one.

        Raises:
            DataError: The microbatch size does not divide the batches. For a number of microbatches that the
                schedule does not take, the pipeline raises an error of its own.
        """
        spec = self.context.spec
        functions = (spec.batch_transforms, spec.split_batch, spec.get_num_samples_in_batch)
        samples = known_batch_size(loader, functions)
        if samples is None:
            return
        size = self.context.state.device_train_microbatch_size
        _check_size(samples, size)
        self._pipeline.check_microbatches(samples // size if isinstance(size, int) else 1)

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`. The events of single microbatches are not fired."""
        context = self.context
        state, facts, step = context.state, context.facts, context.step
        assert facts is not None
        assert step is not None
        self._check_listeners()
        state.outputs = None
        if self.has_gradients:
            self.clear_gradients()
        self.has_gradients = True
        parts = self._parts(batch)
        if (weighing := context.weighing) is not None and not weighing.is_started:
            weighing.start()
        shapes = _shapes(parts[0].batch)
        is_due = weighing is not None and weighing.is_due
        if is_due or shapes not in self._activations:
            self._run_without_blocks(batch, parts[0], shapes, is_due=is_due)
            parts = self._parts(batch)  # with the weights that were found
        is_sum = weighing is not None and weighing.is_sum
        context.mean = mean = LossMean(step, state.parallelism, is_sum=is_sum)
        weights = [mean.total_weight if is_sum and one.weight else one.weight for one in parts]
        self._run_stages(parts, weights, shapes, mean)
        state.batch = batch
        if mean.needs_correction:
            mean.correct(state.module.parameters())
        state.loss = mean_loss = mean.of_this_rank(facts.weight)
        return mean_loss

    def _parts(self, batch: Any) -> list[Microbatch]:
        """Return the microbatches, which have equal shapes.

        Raises:
            DataError: The batch does not divide into such.
        """
        context = self.context
        facts, step = context.facts, context.step
        assert facts is not None
        assert step is not None
        size = context.state.device_train_microbatch_size
        _check_size(facts.samples, size)
        parts = list(microbatches(batch, facts, step, size=size, spec=context.spec))
        if size is None:
            parts = [parts[0]._replace(weight=_whole_weight(facts))]
        shapes = [_shapes(one.batch) for one in parts]
        odd = next((index for index, one in enumerate(shapes) if one != shapes[0]), None)
        if odd is not None:
            raise DataError(
                f"microbatch 0 has tensors of the shapes {_told(shapes[0])}, and microbatch {odd} has "
                f"{_told(shapes[odd])}; a pipeline sends activations of one shape. Split the batch into "
                "microbatches of equal shapes"
            )
        return parts

    def _run_without_blocks(self, batch: Any, part: Microbatch, shapes: Any, *, is_due: bool) -> None:
        """Run a pass that skips the blocks, from which the weights of the loss are read if that is due."""
        context = self.context
        state = context.state
        model: Any = state.model
        state.batch = part.batch
        with self._pipeline.skip_blocks():
            if is_due:
                weighing = context.weighing
                assert weighing is not None
                assert context.step is not None
                weighing.batch = batch
                self._run_forward_and_weigh(weighing, part.weight, LossMean(context.step, state.parallelism))
            else:
                with context.precision.forward():
                    state.outputs = state.module(state.batch)
                    state.loss = model.loss(state.outputs, state.batch)
            loss: Any = state.loss
            if not isinstance(loss, LossSum) and (type(loss) is not torch.Tensor or loss.ndim):
                raise TrainerConfigError(
                    f"the loss of `{type(model).__name__}` is a `{type(loss).__name__}` of several parts, "
                    "which a pipeline does not send from its last stage. Return their sum, or leave `pp` out"
                )
            total = total_of(loss)
            total = total.total if isinstance(total, LossSum) else total
            self._activations[shapes] = self._pipeline.check_skipped([state.outputs, total])
        self._gives_sums = isinstance(loss, LossSum)
        state.outputs = state.loss = None

    def _run_stages(
        self, parts: list[Microbatch], weights: list[Weight], shapes: Any, mean: LossMean
    ) -> None:
        """Run the passes of all microbatches, and tell every rank the loss."""
        context = self.context
        model: Any = context.state.model

        def loss_of(outputs: Any, index: int) -> torch.Tensor:
            return mean.share_of(total_of(model.loss(outputs, parts[index].batch)), weights[index], outputs)

        self._pipeline.run_pipeline(
            [one.batch for one in parts], self._activations[shapes], loss_of, context.precision.forward
        )
        gives_sums = self._gives_sums or any(isinstance(one, torch.Tensor) for one in weights)
        told = self._pipeline.tell_from_last(mean.numbers(context.state.device))
        mean.take_numbers(told, gives_sums=gives_sums)

    def _check_listeners(self) -> None:
        """Refuse what listens to single microbatches, or measures the parameters of the whole model."""
        context = self.context
        for event in _EVENTS:
            for listener in getattr(context.engine.on, event):
                raise _refusal(f"`{listener.name}`, which is called at `{event}` with each microbatch,")
        for callback in context.state.callbacks:
            if getattr(callback, "needs_whole_model", False):
                raise _refusal(f"`{type(callback).__name__}`, which reads the whole model,")
        if context.train_metrics is not None:
            raise _refusal("metrics of training, which need the outputs on every rank,")


def _refusal(subject: str) -> TrainerConfigError:
    return TrainerConfigError(
        f"{subject} does not work with `pp`, where each rank has one stage of the model. Leave it out, or "
        "leave `pp` out of `parallelism_config`"
    )


def _check_size(samples: int, size: Any) -> None:
    if isinstance(size, int) and samples % size:
        fitting = max(one for one in range(1, size + 1) if samples % one == 0)
        raise DataError(
            f"the batch has {samples} samples, which `device_train_microbatch_size` {size} does not divide: "
            f"all microbatches of a pipeline have one size. Use {fitting}, or a loader with `drop_last=True` "
            "if this is the short last batch"
        )


def _whole_weight(facts: Any) -> Weight:
    weight: Weight = facts.weight if facts.weights is None else weight_of(facts, 0, facts.samples)
    return weight


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), one.dtype) for one in tensors(batch))


def _told(shapes: tuple[Any, ...]) -> str:
    return ", ".join(str(shape) for shape, _ in shapes[:3])
