"""A custom algorithm: noise on the inputs that fades, with a state that checkpoints keep."""

import torch
from data import make_loader, make_model

from hocket.trainer import Algorithm, Event, Trainer


class InputNoise(Algorithm):
    """Adds noise to each batch; the size of the noise shrinks by a factor after every batch."""

    events = frozenset({Event.AFTER_DATALOADER})

    def __init__(self, size: float = 0.5, factor: float = 0.95) -> None:
        self.size, self.factor = size, factor

    def match(self, event, state):
        """Run at every event in `events`."""
        return True

    def apply(self, event, state, logger):
        """Replace the batch, and log the size of the noise."""
        x, y = state.batch
        state.batch = (x + self.size * torch.randn_like(x), y)
        logger.log_metrics({"input_noise/size": self.size})
        self.size *= self.factor

    def state_dict(self):
        """Return the size, so that a resumed run continues with it."""
        return {"size": self.size}

    def load_state_dict(self, state):
        """Take over the size from a checkpoint."""
        self.size = state["size"]


if __name__ == "__main__":
    noise = InputNoise()
    with Trainer(
        model=make_model(), train_dataloader=make_loader(), max_duration="2ep", algorithms=noise, seed=1
    ) as trainer:
        trainer.fit()
    print(f"size of the noise at the end: {noise.size:.3f}")
