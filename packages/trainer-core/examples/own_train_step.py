"""A custom training step around the standard one: gradients with noise (Neelakantan et al. 2015)."""

import torch
from data import make_loader, make_model

from hocket.trainer import Algorithm, Event, Trainer


class NoisyGradients:
    """Wraps a step: computes the gradients as before, then adds noise to them."""

    def __init__(self, step, parameters, size: float = 0.01) -> None:
        self.step, self.parameters, self.size = step, list(parameters), size

    def compute_gradients(self, batch):
        """Compute the gradients, and add noise."""
        loss = self.step.compute_gradients(batch)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=self.size)
        return loss

    def update(self):
        """Step the optimizers as before."""
        self.step.update()


class GradientNoise(Algorithm):
    """Puts the noisy step in place of the standard one."""

    events = frozenset({Event.INIT})

    def match(self, event, state):
        """Run at INIT."""
        return True

    def apply(self, event, state, logger):
        """Wrap the training step."""
        state.train_step = NoisyGradients(state.train_step, state.model.parameters())


if __name__ == "__main__":
    with Trainer(
        model=make_model(),
        train_dataloader=make_loader(),
        max_duration="2ep",
        algorithms=GradientNoise(),
        seed=1,
    ) as trainer:
        trainer.fit()
    print("trained for", trainer.state.timestamp.batch)
