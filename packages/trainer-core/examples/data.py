"""The data and the model that the examples share: a synthetic classification task."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.trainer import ComposerClassifier


def make_loader(num_samples: int = 512, seed: int = 0) -> DataLoader:
    """Return batches of 32 samples: 8 features, and the label 1 if their sum is positive, else 0."""
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)


def make_model() -> ComposerClassifier:
    """Return a small classifier that measures accuracy."""
    return ComposerClassifier(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), num_classes=2)
