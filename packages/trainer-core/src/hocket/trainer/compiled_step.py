"""`CompiledStep`: a training step whose forward pass, loss and optimizer go through `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.trainer.engine.engine import Listeners
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.optim import DecoupledAdamW, needs_closure
from hocket.trainer.process.extras import require_compiler
from hocket.trainer.process.rng import capture_rng, restore_rng
from hocket.trainer.state import State
from hocket.trainer.step.step import StandardStep

# ruff: noqa: E701 - an event is one line, as in the training loop
# fmt: off


class CompiledStep(StandardStep):
    """A training step that compiles model and loss, with their backward pass, as one program.

    Each optimizer is compiled, too. `compile_config` compiles the model alone; this step also fuses the loss
    with the model's last layers, and the optimizer's arithmetic into few kernels. Pass the class, or a
    `functools.partial` with options, as `Trainer(train_step=…)`. A `CompileMonitor` reports later
    recompilations.

    No event fires between forward pass and loss, so nothing may listen to `AFTER_FORWARD` and `BEFORE_LOSS`.

    Args:
        inner: The standard step.
        **options: The options of `torch.compile`.

    Example:
        >>> Trainer(model=model, train_step=partial(CompiledStep, mode="max-autotune"), ...)

    Raises:
        MissingExtraError: If torch cannot compile without setuptools, which is not installed.
        TrainerConfigError: When the trainer is built, if something listens to these events; at a step, if a
            listener was added since, or an optimizer evaluates the loss within its step.
    """

    is_compiled = True
    """Whether the trainer reports compilations, by a `CompileMonitor` that it adds."""

    def __init__(self, inner: StandardStep, **options: Any) -> None:
        super().__init__(inner.context)
        if options.get("backend", "inductor") == "inductor": require_compiler("CompiledStep")
        if (on := inner.context.engine.on).after_forward or on.before_loss: _refuse(on)
        self._options = options
        self._compiled: Any = torch.compile(_outputs_and_loss, **options)
        self._rates: dict[int, torch.Tensor] = {}
        self._prepared: set[int] = set()

    def _run_forward(self, state: State, on: Listeners, fire: Callable[[Event], None]) -> None:
        if on.after_forward or on.before_loss: _refuse(on)
        if on.before_forward: fire(Event.BEFORE_FORWARD)
        state.outputs, state.loss = self._compiled(state.module, state.model, state.batch)
        if (reader := self._reader) is not None:
            # The compiled program cannot be observed, so the loss is computed again without it.
            generators = capture_rng(state.device)
            with torch.no_grad(): self._read_loss(reader, state)
            restore_rng(generators, state.device)
        if on.after_loss: fire(Event.AFTER_LOSS)

    def update(self) -> None:
        """See `TrainStep`."""
        groups = [group for optimizer in self.context.state.optimizers for group in optimizer.param_groups]
        for optimizer in self.context.state.optimizers:
            if id(optimizer) not in self._prepared:
                self._prepare(optimizer)
        old_rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self._rate_of(group)
        try:
            super().update()
        finally:
            for group, rate in zip(groups, old_rates, strict=True):
                group["lr"] = rate

    def _prepare(self, optimizer: Optimizer) -> None:
        if needs_closure(optimizer):
            raise TrainerConfigError(
                f"`{type(optimizer).__name__}` evaluates the loss within its step, which `CompiledStep` "
                "cannot compile; leave `train_step` out, and compile the model by `compile_config`"
            )
        if isinstance(optimizer, DecoupledAdamW):
            optimizer.allocate_state()  # else each tensor's new state recompiles the step
        compiled: Any = torch.compile(optimizer.step, **self._options)
        optimizer.step = compiled  # type: ignore[method-assign]
        self._prepared.add(id(optimizer))

    def _rate_of(self, group: dict[str, Any]) -> torch.Tensor:
        """Return the rate as a tensor: a number would be a constant, and each new one would recompile."""
        rate = group["lr"]
        if isinstance(rate, torch.Tensor):
            return rate
        rate_tensor = self._rates.setdefault(id(group), torch.zeros((), dtype=torch.float64, device="cpu"))
        return rate_tensor.fill_(rate)


def _outputs_and_loss(module: nn.Module, model: Any, batch: Any) -> tuple[Any, Any]:
    outputs = module(batch)
    return outputs, model.loss(outputs, batch)


def _refuse(listeners: Listeners) -> None:
    listener = [*listeners.after_forward, *listeners.before_loss][0]
    raise TrainerConfigError(
        f"`{listener.name}` listens between forward pass and loss (`AFTER_FORWARD` or `BEFORE_LOSS`), and "
        "`CompiledStep` compiles both as one; leave it out, or compile the model alone by `compile_config`"
    )
