"""Further recipes for `recipes.py`, with methods that the recipes of `hocket.recipes` do not use.

`blocks` is a ResNet of torchvision's blocks on 320 of scikit-learn's digits, few enough that it overfits: for
methods of images, of convolutions and of the step. `library-bert` is a BERT of transformers on masked source
text, for methods that support its layers. `lines` is a GPT-2 of transformers on single lines of source, which
differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hocket import algos
from hocket.recipes.corpus import source_files
from hocket.recipes.images import CLASSES, digits
from hocket.recipes.language import IGNORED, LENGTH, masked_data
from hocket.recipes.recipe import Recipe
from hocket.trainer import Algorithm, ComposerClassifier

NUM_IMAGES = 320


class FewDigits(Dataset[Any]):
    """The first digits, each through `transform`, as torchvision's data sets do it."""

    def __init__(self) -> None:
        self.images, self.labels = (tensor[:NUM_IMAGES] for tensor in digits()[0].tensors)
        self.transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


def few_digits(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of few digits for training, and of all that are held out."""
    held_out = digits()[1]
    return (
        DataLoader(FewDigits(), batch_size=batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out, batch_size=len(held_out)),
    )


def blocks(width: int = 16) -> ComposerClassifier:
    """Return a ResNet of four of torchvision's blocks, with dropout before its head."""
    from torchvision.models.resnet import BasicBlock

    wider = nn.Sequential(nn.Conv2d(width, 2 * width, 1, stride=2, bias=False), nn.BatchNorm2d(2 * width))
    network = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        BasicBlock(width, width), BasicBlock(width, width),
        BasicBlock(width, 2 * width, stride=2, downsample=wider), BasicBlock(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, CLASSES),
    )  # fmt: skip
    return ComposerClassifier(network, num_classes=CLASSES)


class Library(nn.Module):
    """A model of transformers over the batches of a recipe; its loss is the mean over labels that count."""

    def __init__(self, model: nn.Module, *, is_causal: bool) -> None:
        super().__init__()
        self.model, self.is_causal = model, is_causal

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits, `(B, L, V)`."""
        ids = batch["input_ids"] if "input_ids" in batch else batch["tokens"].long()
        inputs = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        logits: Tensor = self.model(input_ids=ids, **inputs).logits
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the cross-entropy in nats a byte."""
        labels = batch["labels"]
        if self.is_causal:
            outputs, labels = outputs[:, :-1], labels[:, 1:]
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def library_bert() -> Library:
    """Return a BERT of two layers, 64 wide, over bytes."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Library(BertForMaskedLM(config), is_causal=False)


def library_gpt() -> Library:
    """Return a GPT-2 of two layers, 64 wide, over bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Library(GPT2LMHeadModel(config), is_causal=True)


def lines(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of lines of source, cut at `LENGTH` bytes and padded to it; each tenth is held out."""
    text = b"".join(path.read_bytes() for path in source_files()[:60])
    rows = [torch.tensor(list(line[:LENGTH])) for line in text.split(b"\n") if len(line) > 1]
    train, held_out = [row for i, row in enumerate(rows) if i % 10], rows[::10][:128]

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids, lengths = torch.zeros(len(samples), LENGTH, dtype=torch.long), []
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample["input_ids"])] = sample["input_ids"]
            lengths.append(len(sample["input_ids"]))
        mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
        labels = ids.masked_fill(~mask, IGNORED)
        labels[:, 0] = IGNORED
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def loader(rows: list[Tensor], size: int, *, shuffle: bool) -> DataLoader[Any]:
        data: Any = [{"input_ids": row} for row in rows]
        return DataLoader(data, batch_size=size, shuffle=shuffle, drop_last=shuffle, collate_fn=collate)

    return loader(train, batch_size, shuffle=True), loader(held_out, 128, shuffle=False)


def _schedule_free(parameters: Iterable[nn.Parameter], lr: float) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=lr, warmup_steps=30)


METHODS: dict[str, Callable[[], Algorithm]] = {
    "AugMix": lambda: algos.AugMix(severity=1, width=2),
    "ColOut": lambda: algos.ColOut(0.15, 0.15),
    "CutMix": lambda: algos.CutMix(1.0),
    "CutOut": lambda: algos.CutOut(1, 0.3),
    "Factorize": lambda: algos.Factorize(min_channels=16, latent_channels=0.5, min_features=64),
    "GhostBatchNorm": lambda: algos.GhostBatchNorm(16),
    "GyroDropout": lambda: algos.GyroDropout(0.1, 64, 8),
    "LabelSmoothing": lambda: algos.LabelSmoothing(0.1),
    "LayerFreezing": lambda: algos.LayerFreezing(0.5, 0.8),
    "MixUp": lambda: algos.MixUp(0.2),
    "RandAugment": lambda: algos.RandAugment(severity=3, depth=1),
    "SAM": lambda: algos.SAM(0.05),
    "ScheduleFree": lambda: algos.ScheduleFree(),
    "SelectiveBackprop": lambda: algos.SelectiveBackprop(0.5, 0.9, interrupt=2),
    "SqueezeExcite": lambda: algos.SqueezeExcite(8, 16),
    "StochasticDepth": lambda: algos.StochasticDepth("ResNetBasicBlock", drop_rate=0.2),
    "SWA": lambda: algos.SWA("0.6dur", "0.95dur", "10ba"),
    "WeightStandardization": lambda: algos.WeightStandardization(),
    "ZLoss": lambda: algos.ZLoss(1e-3, class_dim=1, shift=False),
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], Any]] = {"ScheduleFree": _schedule_free}
"""Optimizers, used without a schedule, of the methods that need a particular one."""

RECIPES = {
    "blocks": Recipe(
        make_model=blocks,
        make_data=few_digits,
        methods=METHODS,
        metric="MulticlassAccuracy",
        target=0.94,
        higher_is_better=True,
        steps=120,
    ),
    "library-bert": Recipe(
        make_model=library_bert,
        make_data=masked_data,
        methods={"GatedLinearUnits": lambda: algos.GatedLinearUnits()},
        target=3.3,
        learning_rate=1e-3,
        steps=150,
    ),
    "lines": Recipe(
        make_model=library_gpt,
        make_data=lines,
        methods={"SequencePacking": lambda: algos.SequencePacking(LENGTH)},
        target=3.1,
        learning_rate=1e-3,
        steps=100,
    ),
}
