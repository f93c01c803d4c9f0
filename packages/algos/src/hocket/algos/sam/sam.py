"""SAM: gradients taken where the loss nearby is largest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hocket.algos.checks import check_count, check_number
from hocket.algos.errors import IncompatibleError
from hocket.algos.order import Order
from hocket.trainer.algorithm import Algorithm
from hocket.trainer.checks import Described
from hocket.trainer.event import Event
from hocket.trainer.optim import needs_closure
from hocket.trainer.process.rng import capture_rng, restore_rng
from hocket.trainer.ranks.sharded_tensors import local_part

if TYPE_CHECKING:
    from hocket.trainer.log.logger import Logger
    from hocket.trainer.protocols import TrainStep
    from hocket.trainer.state import State


class SAM(Algorithm):
    """Sharpness-aware minimization: a step with the gradient at the worst point within `rho` of the weights.

    A step takes two forward and backward passes over the batch. Both use the same random draws, and the
    second does not change the statistics of batch and instance norms, the logged losses or the training
    metrics.

    Args:
        rho: Distance of the point at which gradients are taken, at least 0.
        epsilon: Number added to the gradients' norm.
        interval: Steps from one such step to the next; the others are plain.

    Raises:
        AlgorithmConfigError: An argument is out of range.

    Example:
        >>> SAM(rho=0.05)
        SAM(rho=0.05, epsilon=1e-12, interval=1)

    Source: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, 2020,
    algorithm 1.
    """

    events: ClassVar[frozenset[Event] | None] = frozenset({Event.INIT})
    order = Order.SAM

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        check_number("rho", rho, least=0)
        check_number("epsilon", epsilon, least=0)
        check_count("interval", interval)
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval

    def apply(self, event: Event, state: "State", logger: "Logger") -> None:
        """Wrap the training step.

        Raises:
            IncompatibleError: The optimizer evaluates the loss within its step.
        """
        closing = [type(one).__name__ for one in state.optimizers if needs_closure(one)]
        if closing:
            raise IncompatibleError(
                f"`SAM` gives the optimizer one gradient a step, but `{closing[0]}` evaluates the loss "
                "several times; use another optimizer"
            )
        state.train_step = SAMStep(
            state.train_step, state, rho=self.rho, epsilon=self.epsilon, interval=self.interval
        )

    def conflict_with(self, other: Any) -> str | None:
        """Refuse a second `SAM`."""
        return "each doubles the passes of a step; remove one of them" if isinstance(other, SAM) else None

    def __repr__(self) -> str:
        return f"SAM(rho={self.rho!r}, epsilon={self.epsilon!r}, interval={self.interval!r})"


class SAMStep(Described):
    """A training step that wraps another one and computes its gradients twice.

    Args:
        inner: The wrapped step, which computes gradients and updates.
        state: State of the run.
        rho: Same as for `SAM`.
        epsilon: Same as for `SAM`.
        interval: Same as for `SAM`.
    """

    def __init__(
        self, inner: "TrainStep", state: "State", *, rho: float, epsilon: float, interval: int
    ) -> None:
        self.inner = inner
        self._state = state
        self._rho = rho
        self._epsilon = epsilon
        self._interval = interval

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """Compute the gradients at the worst point nearby; return the loss at the weights themselves.

        Collective: gradients are averaged over the ranks in both passes, so that all ranks climb to the
        same point.
        """
        state = self._state
        if (state.timestamp.counts.batch + 1) % self._interval:
            return self.inner.compute_gradients(batch)
        draws = capture_rng(state.device)
        loss = self.inner.compute_gradients(batch)
        rng_state, outputs = capture_rng(state.device), state.outputs
        parameters = [
            parameter
            for optimizer in state.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norm = state.parallelism.clip_grad_norm_(parameters, float("inf"))
        local_parts = [local_part(parameter.detach()) for parameter in parameters]
        saved_values = [torch.empty_like(part) for part in local_parts]
        if saved_values:
            torch._foreach_copy_(saved_values, local_parts)
        try:
            _climb(parameters, local_parts, self._rho / (norm + self._epsilon))
            restore_rng(draws, state.device)
            with _frozen_statistics(state.model), _kept_facts(self.inner):
                self.inner.compute_gradients(batch)
        finally:
            # Copies, because a step back would not restore the same bits, nor undo an overflow.
            with torch.no_grad():
                if saved_values:
                    torch._foreach_copy_(local_parts, saved_values)
        restore_rng(rng_state, state.device)
        state.loss, state.outputs = loss, outputs
        return loss

    def update(self) -> None:
        """Update the weights with the present gradients."""
        self.inner.update()


@torch.no_grad()
def _climb(parameters: list[torch.Tensor], local_parts: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Add the scaled gradients to the weights; the gradients are overwritten."""
    if not parameters:
        return
    gradients = [
        local_part(parameter.grad.detach()) for parameter in parameters if parameter.grad is not None
    ]
    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    torch._foreach_add_(local_parts, gradients)


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Restore the running statistics of batch and instance norms, which still normalize by the batch.

    They are copied, because instance norm updates them in training whatever `track_running_stats` says.
    """
    statistics = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        for buffer in module.buffers(recurse=False)
    ]
    saved_values = [buffer.clone() for buffer in statistics]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(statistics, saved_values, strict=True):
                buffer.copy_(value)


@contextmanager
def _kept_facts(step: Any) -> Iterator[None]:
    """Preserve the mean loss and its parts, which are logged, and count a batch only once in metrics."""
    context: Any = None
    while step is not None and context is None:
        context, step = getattr(step, "context", None), getattr(step, "inner", None)
    if context is None:
        yield
        return
    mean, context.mean = context.mean, None
    metrics, context.train_metrics = context.train_metrics, None
    parts, context.loss_parts = context.loss_parts, type(context.loss_parts)()
    try:
        yield
    finally:
        context.mean, context.train_metrics, context.loss_parts = mean, metrics, parts
