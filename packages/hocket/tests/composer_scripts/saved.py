"""A run that saves each epoch, for Composer 0.32.1 and for `hocket.compat.composer`.

`python saved.py FOLDER [CHECKPOINT]` trains for two epochs, from a checkpoint if one is given, and stores as
`FOLDER/final.pt` the counts, the weights after the last batch, and their averages.
"""

import sys
import warnings
from pathlib import Path

import torch
from composer import Callback, Trainer
from composer.algorithms import EMA, LabelSmoothing
from composer.callbacks import SpeedMonitor
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class KeepWeights(Callback):
    def batch_end(self, state, logger):
        self.kept = weights(state.model)


folder = Path(sys.argv[1])
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None

generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3)
module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
with torch.no_grad():
    for parameter in module.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
model = ComposerClassifier(module, num_classes=3)
average, last = EMA(half_life="3ba"), KeepWeights()
trainer = Trainer(
    model=model,
    optimizers=DecoupledAdamW(model.parameters(), lr=0.01),
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="2ep",
    algorithms=[LabelSmoothing(smoothing=0.1), average],
    callbacks=[SpeedMonitor(window_size=2), last],
    save_folder=str(folder / "checkpoints"),
    save_filename="ep{epoch}-rank{rank}.pt",
    load_path=checkpoint,
    run_name="saved",
    device="cpu",
    seed=7,
    progress_bar=False,
)
first = trainer.state.timestamp.batch.value
trainer.fit()
batches = (first, trainer.state.timestamp.batch.value)
try:
    averaged = weights(average.get_ema_model(trainer.state.model))
except ValueError:  # in Composer the last save leaves the averages in the model
    averaged = weights(trainer.state.model)
torch.save({"batches": batches, "trained": last.kept, "averaged": averaged}, folder / "final.pt")
trainer.close()
