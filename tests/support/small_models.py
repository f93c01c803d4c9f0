"""A small GPT and a small convolutional network for tests of layouts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.recipes.gpt import GPT, GPTConfig

BATCH = 8


class ConvBlock(nn.Module):
    """A residual block of two convolutions with group normalisation, `(B, C, H, W)` to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


class ConvNet(nn.Module):
    """Classifies 8 × 8 images of one channel into 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(6) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.stem(batch["image"])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.float(), batch["label"])


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "conv":
        return ConvNet()
    return GPT(GPTConfig(context=8, width=12, num_layers=3, num_heads=2))


def batches(kind: str, steps: int) -> list[dict[str, Tensor]]:
    """Return the global batches, which are equal in every process."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(steps):
        if kind == "conv":
            image = torch.randn(BATCH, 1, 8, 8, generator=generator)
            made.append({"image": image, "label": torch.randint(5, (BATCH,), generator=generator)})
        else:
            tokens = torch.randint(0, 256, (BATCH, 9), generator=generator, dtype=torch.uint8)
            made.append({"tokens": tokens})
    return made
