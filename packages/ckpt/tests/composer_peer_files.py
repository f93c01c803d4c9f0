"""A script for Composer's environment: trains a model and saves checkpoints to the folder of its argument."""

import sys

import torch
from composer import Trainer
from composer.algorithms import EMA, LabelSmoothing
from composer.models import ComposerClassifier
from composer.optim import LinearScheduler
from torch.utils.data import DataLoader, TensorDataset

folder = sys.argv[1]
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
model = ComposerClassifier(network, num_classes=3)
batches = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), 8)
Trainer(
    model=model,
    train_dataloader=batches,
    max_duration="1ep",
    optimizers=torch.optim.AdamW(model.parameters()),
    schedulers=[LinearScheduler()],
    algorithms=[EMA("1ba"), LabelSmoothing(0.1)],
    save_folder=folder,
    save_interval="1ep",
    progress_bar=False,
).fit()
torch.save(model.state_dict(), f"{folder}/expected.pt")
