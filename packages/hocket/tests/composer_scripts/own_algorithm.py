"""A user's own training method, an algorithm with `match` and `apply`, together with one of Composer's."""

import warnings

import torch
from composer import Trainer
from composer.algorithms import LabelSmoothing
from composer.core import Algorithm, Event, Time, TimeUnit
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def add_noise(inputs, scale):
    """Return the inputs with noise added; the functional form."""
    return inputs + scale * torch.randn_like(inputs)


class InputNoise(Algorithm):
    """Adds noise to the inputs of each batch until a given time, decreasing from step to step."""

    def __init__(self, scale=0.1, until="2ep"):
        self.scale = scale
        self.until = Time.from_timestring(until)
        self.applied = 0

    def match(self, event, state):
        return event == Event.AFTER_DATALOADER and state.timestamp < self.until

    def apply(self, event, state, logger):
        assert state.max_duration.unit == TimeUnit.EPOCH
        scale = self.scale * (1 - state.timestamp.epoch.value / state.max_duration.value)
        inputs = state.batch_get_item(0)
        state.batch_set_item(0, add_noise(inputs, scale))
        self.applied += 1
        logger.log_metrics({"input_noise/scale": scale})

    def state_dict(self):
        return {"applied": self.applied}

    def load_state_dict(self, state):
        self.applied = state["applied"]


warnings.simplefilter("ignore")
torch.manual_seed(17)
centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
labels = torch.arange(192) % 3
inputs = centers[labels] + 0.3 * torch.randn(192, 8, generator=torch.Generator().manual_seed(2))
dataset = TensorDataset(inputs, labels)
model = ComposerClassifier(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), num_classes=3)
noise, in_memory = InputNoise(), InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(dataset, batch_size=16, sampler=dist.get_sampler(dataset, shuffle=True)),
    eval_dataloader=DataLoader(dataset, batch_size=16, sampler=dist.get_sampler(dataset)),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
    max_duration="4ep",
    algorithms=[noise, LabelSmoothing(smoothing=0.1)],
    loggers=[in_memory],
    device="cpu",
    progress_bar=False,
    seed=17,
)
trainer.fit()
accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item()
trainer.close()
applied = dist.all_gather_object(noise.applied)
if dist.get_global_rank() == 0:
    scales = [round(float(scale), 4) for _, scale in in_memory.data["input_noise/scale"]]
    print(f"batches={trainer.state.timestamp.batch.value} applied={applied} scales={scales[0]}..{scales[-1]}")
    print(f"accuracy={accuracy:.3f}", flush=True)
