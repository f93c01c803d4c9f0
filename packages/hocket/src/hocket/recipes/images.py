"""Images: a ResNet and a small ViT on scikit-learn's digits.

`python -m hocket.recipes.images resnet` trains plainly, `--stack` with the recipe's methods. The data are
1,797 grey images of 8 × 8; a fifth is held out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hocket import algos
from hocket.recipes.recipe import Recipe, main
from hocket.trainer import ComposerClassifier

CLASSES = 10


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits for training and evaluation: `(N, 1, 8, 8)` from 0 to 1, and labels.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "the digits come from scikit-learn, which is not installed: `pip install scikit-learn`"
        ) from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, trained = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[trained], labels[trained]), TensorDataset(images[held_out], labels[held_out])


def make_data(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of the digits."""
    train, held_out = digits()
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out, batch_size=len(held_out)),
    )


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, `(B, C, H, W)`."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        is_same_shape = width == out and stride == 1
        self.shortcut = (
            nn.Identity() if is_same_shape else nn.Conv2d(width, out, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        branch = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(self.shortcut(x) + branch)


class ResNet(nn.Sequential):
    """Three residual blocks over 8 × 8 and 4 × 4 pixels (He et al. 2016); logits `(B, 10)`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, CLASSES),
        )


class ViT(nn.Module):
    """A vision transformer over 16 patches of 2 × 2 (Dosovitskiy et al. 2021); logits `(B, 10)`."""

    def __init__(self, width: int = 48, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Classify `(B, 1, 8, 8)`."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return logits


RECIPES = {
    "resnet": Recipe(
        make_model=lambda: ComposerClassifier(ResNet(), num_classes=CLASSES),
        make_data=make_data,
        methods={
            "BlurPool": lambda: algos.BlurPool(min_channels=16),
            "ChannelsLast": lambda: algos.ChannelsLast(),
            "EMA": lambda: algos.EMA("10ba"),
            "LabelSmoothing": lambda: algos.LabelSmoothing(0.1),
            "ProgressiveResizing": lambda: algos.ProgressiveResizing(
                initial_scale=0.75, delay_fraction=0.0, finetune_fraction=0.5, size_increment=2
            ),
        },
        stack=("ChannelsLast", "EMA", "LabelSmoothing"),
        metric="MulticlassAccuracy",
        target=0.98,
        higher_is_better=True,
    ),
    "vit": Recipe(
        make_model=lambda: ComposerClassifier(ViT(), num_classes=CLASSES),
        make_data=make_data,
        methods={
            "CutOut": lambda: algos.CutOut(1, 0.3),
            "EMA": lambda: algos.EMA("10ba"),
            "GradientClipping": lambda: algos.GradientClipping("norm", 1.0),
            "LabelSmoothing": lambda: algos.LabelSmoothing(0.1),
        },
        stack=("EMA", "LabelSmoothing"),
        metric="MulticlassAccuracy",
        target=0.93,
        higher_is_better=True,
        steps=300,
    ),
}


if __name__ == "__main__":
    main(RECIPES, __doc__)
