"""Train steps: one update of the model in two methods, which a user may wrap or replace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.engine.engine import Engine, Listeners
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.metrics.train_metrics import TrainMetrics
from hocket.trainer.optim import has_two_steps, hold_schedulers, needs_closure
from hocket.trainer.precision import Precision
from hocket.trainer.protocols import TrainStep, Work
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.ranks.step_sync import GlobalStep
from hocket.trainer.state import State
from hocket.trainer.step.accumulation import (
    LossMean,
    Weight,
    first_microbatch,
    microbatches,
    weight_of,
)
from hocket.trainer.step.losses.loss_parts import LossParts
from hocket.trainer.step.losses.loss_reader import LossReader
from hocket.trainer.step.losses.loss_weighing import LossWeighing
from hocket.trainer.step.losses.losses import Loss, eagerly, is_compiled, total_of, trying

# ruff: noqa: E701 - an event is one line, as in the training loop
# fmt: off


@dataclass(slots=True, kw_only=True)
class StepContext:
    """The parts of a run that a step uses. The loop sets `facts` and `step` before each step."""

    state: State
    engine: Engine
    precision: Precision
    spec: DataSpec = field(default_factory=lambda: DataSpec(dataloader=()))
    train_metrics: TrainMetrics | None = None
    facts: DeviceBatch | None = None
    """The counts and loss weights of this rank's batch."""
    step: GlobalStep | None = None
    """The facts about the global batch."""
    mean: LossMean | None = None
    """The mean loss of the batch, if the standard step computed it."""
    weighing: LossWeighing | None = None
    """Finds the loss weights from the loss; None if they are stated."""
    compare_uncompiled: Callable[[Callable[[], object]], bool] | None = None
    """Has the layout of a compiled model compare what a pass computes; None once it needs no further pass."""
    loss_parts: LossParts = field(default_factory=LossParts)
    """The named parts of the batch's loss, if the model returns any."""
    is_skipped: bool = False
    """Whether the present step is one of `steps_to_skip`, which has no loss."""
    keeps_outputs: bool = False
    """Whether a user's step may read the outputs after the backward pass."""
    standard: StandardStep | None = None
    """The standard step, which a user's step may wrap."""
    unoptimized: list[torch.nn.Parameter] = field(default_factory=list)
    """The parameters that no optimizer holds, and whose gradients no optimizer clears."""

    def find_unoptimized(self) -> None:
        """Update `unoptimized`, in place; parameters that need no gradients are left out."""
        groups = [group for optimizer in self.state.optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        parameters = self.state.module.parameters()
        self.unoptimized[:] = [one for one in parameters if one.requires_grad and id(one) not in held]

    def clear_unoptimized(self) -> None:
        """Clear the gradients of the parameters that no optimizer holds, so that they do not add up."""
        for parameter in self.unoptimized: parameter.grad = None

    def finish_gradients(self) -> None:
        """Unscale the gradients of fp16, and fire `AFTER_TRAIN_BATCH`, at which they may be clipped."""
        if self.precision.is_scaled: self.unscale()
        if self.engine.on.after_train_batch: self.engine.fire(Event.AFTER_TRAIN_BATCH)

    def unscale(self) -> None:
        """Unscale the gradients of fp16, also those that count in the norm alone."""
        others = [local_part(one.grad) for one in self.unoptimized if one.grad is not None]
        self.precision.unscale(self.state.optimizers, others)

    def skip_update(self) -> None:
        """Clear the gradients without an update."""
        self.precision.step(self.state.optimizers, skip=True)
        if self.standard is not None: self.standard.has_gradients = False


class StandardStep:
    """The standard step: forward, loss and backward on each microbatch, then one step of every optimizer.

    Args:
        context: The parts of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self.context = context
        context.standard = self
        self.has_gradients = False
        """Whether gradients were computed since the last update."""
        self._reader: LossReader | None = None
        self._total: Loss | None = None

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`; fires the events from `BEFORE_FORWARD` to `AFTER_BACKWARD` for each microbatch."""
        context = self.context
        state, facts, step = context.state, context.facts, context.step
        assert facts is not None
        assert step is not None
        if context.loss_parts.is_used: context.loss_parts.clear()
        state.outputs = None
        # The metrics include a batch once, even if its gradients are computed several times.
        train_metrics = None if self.has_gradients else context.train_metrics
        if self.has_gradients: self.clear_gradients()
        self.has_gradients = True
        if context.compare_uncompiled is not None: self._compare_uncompiled(batch, facts, step)
        size, parallelism = state.device_train_microbatch_size, state.parallelism
        is_sum = False
        if (weighing := context.weighing) is not None:
            if size is not None and not weighing.is_started: weighing.start()
            is_sum, weighing.batch = weighing.is_sum, batch if weighing.is_due else None
        context.mean = mean = LossMean(step, parallelism, is_sum=is_sum)
        if size is None and context.spec.microbatch_transforms is None:
            weight = facts.weight if facts.weights is None else weight_of(facts, 0, facts.samples)
            self._run_microbatch(weight, mean, train_metrics, is_counted=facts.counted > 0)
        else:
            parts = microbatches(batch, facts, step, size=size, spec=context.spec)
            for state.batch, weight, is_counted, is_last in parts:
                if size is not None: parallelism.sync_gradients(state.module, is_last)
                self._run_microbatch(weight, mean, train_metrics, is_counted=is_counted)
        state.batch = batch
        if mean.needs_correction: mean.correct(state.module.parameters())
        state.loss = mean_loss = mean.of_this_rank(facts.weight)
        return mean_loss

    def _compare_uncompiled(self, batch: Any, facts: DeviceBatch, step: GlobalStep) -> None:
        """Let the layout compare a pass on the first microbatch, if it has yet to. Collective.

        A compiled program has no comparison in it. Random generators, buffers and the batch stay as they are.
        """
        context, state = self.context, self.context.state
        assert context.compare_uncompiled is not None

        def forward() -> None:
            size, copied = state.device_train_microbatch_size, copy.deepcopy(batch)
            with trying(state.module, state.device):
                part = next(microbatches(copied, facts, step, size=size, spec=context.spec))
                with context.precision.forward(): state.module(part.batch)

        if not context.compare_uncompiled(forward): context.compare_uncompiled = None

    def _run_microbatch(
        self, weight: Weight, mean: LossMean, train_metrics: TrainMetrics | None, *, is_counted: bool
    ) -> None:
        """Run forward, loss and backward on `state.batch`."""
        context = self.context
        state, on, fire, precision = context.state, context.engine.on, context.engine.fire, context.precision
        if (weighing := context.weighing) is not None and weighing.is_due:
            weight = self._run_forward_and_weigh(weighing, weight, mean)
        elif precision.is_plain:
            self._run_forward(state, on, fire)
        else:
            with precision.forward(): self._run_forward(state, on, fire)
        self._run_backward(weight, mean, train_metrics, is_counted=is_counted)

    def _run_forward_and_weigh(self, weighing: LossWeighing, weight: Weight, mean: LossMean) -> Weight:
        """Run forward and loss on the first microbatch, and weigh the batch as this loss does. Collective.

        Returns:
            The weight of the microbatch.
        """
        context = self.context
        state, facts, step, model = context.state, context.facts, context.step, context.state.model
        assert facts is not None
        assert step is not None
        self._reader = reader = LossReader()
        reader.is_in_loss = not getattr(model, "has_loss_in_outputs", False)
        try:
            with context.precision.forward():
                if reader.is_in_loss or is_compiled(model):
                    self._run_forward(state, context.engine.on, context.engine.fire)
                else:
                    with reader: self._run_forward(state, context.engine.on, context.engine.fire)
            num_samples = first_microbatch(facts, step, state.device_train_microbatch_size)
            weighing.take(reader, self._total, state.batch, num_samples, facts, step)
        finally:
            self._reader = self._total = None
        mean.total_weight, mean.is_sum = step.weight, weighing.is_sum
        return weight_of(facts, 0, num_samples)

    def _read_loss(self, reader: LossReader, state: State) -> Any:
        """Return the loss of `state.batch`, whose computation the reader observes."""
        model: Any = state.model
        if not reader.is_in_loss:
            loss = model.loss(state.outputs, state.batch)
            self._total = total_of(loss)
            return loss
        with eagerly(), reader:
            loss = model.loss(state.outputs, state.batch)
            self._total = total_of(loss)
        return loss

    def _run_backward(
        self, weight: Weight, mean: LossMean, train_metrics: TrainMetrics | None, *, is_counted: bool
    ) -> None:
        """Weight `state.loss` and run the backward pass."""
        context = self.context
        state, on, fire, precision = context.state, context.engine.on, context.engine.fire, context.precision
        if on.before_backward: fire(Event.BEFORE_BACKWARD)
        # The sums of microbatches are added as they are.
        if mean.is_sum and weight: weight = mean.total_weight
        loss: Loss = state.loss
        if type(loss) is not torch.Tensor or loss.ndim:
            context.loss_parts.add(loss, weight)
            loss = total_of(loss)
        loss = mean.share_of(loss, weight, state.outputs)
        if train_metrics is None and not (context.engine.keeps_outputs or context.keeps_outputs):
            state.outputs = None
        if precision.is_scaled: precision.backward(loss)
        else: loss.backward()  # type: ignore[no-untyped-call]  # of torch
        if on.after_backward: fire(Event.AFTER_BACKWARD)
        if train_metrics is not None:
            with torch.no_grad(): train_metrics.update(state.batch, state.outputs, is_counted=is_counted)

    def _run_forward(self, state: State, on: Listeners, fire: Callable[[Event], None]) -> None:
        """Set `state.outputs` and `state.loss` from `state.batch`."""
        model: Any = state.model
        if on.before_forward: fire(Event.BEFORE_FORWARD)
        state.outputs = None  # frees the outputs of the previous microbatch first
        state.outputs = state.module(state.batch)
        if on.after_forward: fire(Event.AFTER_FORWARD)
        if on.before_loss: fire(Event.BEFORE_LOSS)
        if (reader := self._reader) is None: state.loss = model.loss(state.outputs, state.batch)
        else: state.loss = self._read_loss(reader, state)
        if on.after_loss: fire(Event.AFTER_LOSS)

    def clear_gradients(self) -> None:
        """Set every gradient to None."""
        for optimizer in self.context.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.context.clear_unoptimized()
        self.has_gradients = False

    def update(self) -> None:
        """See `TrainStep`. A global batch of loss weight 0 updates nothing."""
        context = self.context
        assert context.step is not None
        precision, state = context.precision, context.state
        precision.step(state.optimizers, skip=not context.step.weight)
        if precision.is_scaled and state.schedulers: hold_schedulers(state, precision.has_skipped)
        self.has_gradients = False


class ClosureStep:
    """A step for optimizers that evaluate the loss several times in one step, such as `torch.optim.LBFGS`.

    The trainer takes it for an optimizer whose `step` requires a closure, and for those with the two steps of
    SAM; for any other that needs one, pass the class as `Trainer(train_step=ClosureStep)`.

    `update` passes a closure to the optimizer. The first call of the closure uses the gradients of
    `compute_gradients`, unless the optimizer has moved the parameters or cleared the gradients by then; with
    an optimizer other than LBFGS, one process compares them, and several compute again. Any other call
    computes gradients at the optimizer's trial parameters and fires `AFTER_TRAIN_BATCH` again, so that the
    gradients of every evaluation are clipped alike.

    Args:
        inner: The step that computes the gradients: the standard step, or one that wraps it.

    Raises:
        TrainerConfigError: If there is more than one optimizer, or the precision is fp16, whose gradient
            scale a closure cannot follow.
    """

    def __init__(self, inner: StandardStep) -> None:
        self.inner = inner
        self._context = inner.context
        state = self._context.state
        if len(state.optimizers) != 1 or state.precision == "amp_fp16":
            raise TrainerConfigError(
                f"`{type(state.optimizers[0]).__name__}` evaluates the loss within its step, which works "
                f"with one optimizer, in fp32 or bf16; there are {len(state.optimizers)} and `precision` is "
                f"`{state.precision}`"
            )
        self._batch: Any = None
        self._loss: torch.Tensor | None = None
        self._is_fresh = False
        # LBFGS asks first for what is known; SAM moves the parameters first; of others, the bits tell.
        optimizer, is_alone = state.optimizers[0], state.parallelism.data_parallel[1] == 1
        self._is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
        self._is_asked = is_alone and not self._is_lbfgs and not has_two_steps(optimizer)
        self._bits: torch.Tensor | None = None

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`."""
        self._batch, self._is_fresh = batch, True
        self._loss = self.inner.compute_gradients(batch)
        return self._loss

    def update(self) -> None:
        """See `TrainStep`."""
        optimizer: Any = self._context.state.optimizers[0]
        context = self._context
        step, mean = context.step, context.mean
        parts, context.loss_parts = context.loss_parts, LossParts()
        if step is None or step.weight:
            self._bits = self._bits_now() if self._is_asked else None
            optimizer.step(self._evaluate)
        self.inner.clear_gradients()
        # The loss of the step is the loss before the update, as torch's optimizers return it.
        context.state.loss, context.mean, context.loss_parts = self._loss, mean, parts

    def _evaluate(self) -> torch.Tensor:
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_fresh and (self._is_lbfgs or self._is_unmoved()):
            assert self._loss is not None
            return self._loss
        with torch.enable_grad():
            loss = self.inner.compute_gradients(self._batch)
        self._context.finish_gradients()
        return loss

    def _is_unmoved(self) -> bool:
        """Return whether parameters and gradients are as they were before the step; reads the device."""
        return self._bits is not None and torch.equal(self._bits, self._bits_now())

    def _bits_now(self) -> torch.Tensor:
        """Return the sum of the bits of each parameter and gradient, -1 for no gradient."""
        groups = self._context.state.optimizers[0].param_groups
        pairs = [(one, one.grad) for group in groups for one in group["params"]]
        return torch.stack([_sum_of_bits(tensor, pairs[0][0]) for pair in pairs for tensor in pair])


def _sum_of_bits(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.full((), -1, dtype=torch.int64, device=like.device)
    local: torch.Tensor = local_part(tensor).detach().contiguous().reshape(-1)
    return local.view(torch.uint8).sum(dtype=torch.int64).to(like.device)


class FunctionStep:
    """A step whose gradients a user's function `(state, batch) -> loss` computes.

    Args:
        function: A function that runs forward and backward passes on this rank's batch and returns the mean
            loss.
        inner: The standard step, which updates the model.
    """

    def __init__(self, function: Callable[[State, Any], torch.Tensor], inner: StandardStep) -> None:
        self.inner = inner
        self._function = function
        self._has_gradients = False

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`."""
        state = self.inner.context.state
        if self._has_gradients: self.inner.clear_gradients()
        self._has_gradients = True
        loss: torch.Tensor = self._function(state, batch).detach()
        state.loss = loss
        return loss

    def update(self) -> None:
        """See `TrainStep`."""
        self.inner.update()
        self._has_gradients = False


def choose_step(given: Any, context: StepContext) -> TrainStep:
    """Make the step of a run.

    Args:
        given: None for the standard step (a `ClosureStep` where the optimizer needs closures); an object with
            `compute_gradients` and `update`; a class or `functools.partial`, called with the standard step;
            or a function `(state, batch) -> loss`.
        context: The parts of the run.

    Raises:
        TrainerConfigError: If `given` is none of these.
    """
    standard = StandardStep(context)
    with_closure = [type(one).__name__ for one in context.state.optimizers if needs_closure(one)]
    if given is None:
        return ClosureStep(standard) if with_closure else standard
    context.keeps_outputs = True
    step: Any = given(standard) if isinstance(given, (type, partial)) else given
    if isinstance(step, TrainStep):
        return step
    if callable(step) and not isinstance(given, (type, partial)):
        if with_closure:
            raise TrainerConfigError(
                f"`train_step` is a function, which computes the gradients once, and `{with_closure[0]}` "
                "evaluates the loss within its step; leave `train_step` out, or pass a class with `update`"
            )
        return FunctionStep(step, standard)
    raise TrainerConfigError(
        f"`train_step` is a `{type(step).__name__}`; expected an object with `compute_gradients(batch)` and "
        "`update()`, a class that takes the standard step, or a function `(state, batch) -> loss`"
    )


def mean_over_ranks(context: StepContext, loss: torch.Tensor) -> Work | torch.Tensor:
    """Return the mean loss of the global batch, or a handle with a method `wait`. Collective."""
    mean, context.mean = context.mean, None
    if mean is None or not mean.has_parts:
        return LossMean.plain(loss, context.state.parallelism)
    return mean.over_ranks()
