"""The suite of `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hocket.trainer.step.step import StandardStep
from hocket.trainer.trainer import Trainer


class _TinyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def _batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)] for _ in range(4)
    ]


def check_train_step(make: Callable[[StandardStep], Any]) -> None:
    """Check a step in a training on the CPU, over microbatches too.

    Args:
        make: A function that makes the step from the standard one, which has the model and optimizers in
            `context.state`.

    Raises:
        AssertionError: If a second computation of the gradients adds to the first, gradients are left after
            an update, an update changes nothing, or the returned loss is not a scalar without gradients.
    """
    for size in (None, 2):
        model = _TinyNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checked_steps: list[_CheckedStep] = []

        def checked(
            standard: StandardStep, checked_steps: list[_CheckedStep] = checked_steps
        ) -> _CheckedStep:
            checked_steps.append(_CheckedStep(make(standard), standard.context.state.model))
            return checked_steps[-1]

        with Trainer(
            model=model,
            train_dataloader=_batches(),
            optimizers=optimizer,
            train_step=partial(checked),
            device_train_microbatch_size=size,
            max_duration="4ba",
            progress_bar=False,
            device="cpu",
            seed=1,
        ) as trainer:
            trainer.fit()
        assert checked_steps[0].num_updates == 4, f"{checked_steps[0].num_updates} of 4 batches were updated"


class _CheckedStep:
    """A step that checks the loss, the gradients and the parameters after each call of another step."""

    def __init__(self, step: Any, model: nn.Module) -> None:
        self.step = step
        self.model = model
        self.num_updates = 0

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        self.step.compute_gradients(batch)
        first = self._gradients()
        loss = self.step.compute_gradients(batch)
        assert isinstance(loss, torch.Tensor), f"the loss is a `{type(loss).__name__}`; expected a tensor"
        assert loss.dim() == 0, f"the loss has the shape {tuple(loss.shape)}; expected a scalar"
        assert not loss.requires_grad, "the returned loss has gradients; detach it"
        for name, gradient in self._gradients().items():
            torch.testing.assert_close(
                gradient,
                first[name],
                msg=f"a second `compute_gradients` changed the gradient of `{name}`: it must replace the "
                "first",
            )
        return loss

    def update(self) -> None:
        old_values = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.step.update()
        self.num_updates += 1
        parameters = dict(self.model.named_parameters())
        assert any(not torch.equal(old_values[name], parameters[name]) for name in old_values), (
            "`update` changed nothing"
        )
        names_with_gradient = [
            name for name, value in parameters.items() if value.grad is not None and value.grad.any()
        ]
        assert not names_with_gradient, f"`update` left gradients of {names_with_gradient}"

    def _gradients(self) -> dict[str, torch.Tensor]:
        gradients = {
            name: value.grad.detach().clone()
            for name, value in self.model.named_parameters()
            if value.grad is not None
        }
        assert gradients, "`compute_gradients` left no gradients"
        return gradients
