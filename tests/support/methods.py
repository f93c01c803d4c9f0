"""Training methods on tiny models: cases, data and a short training that tests and benchmarks share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hocket import algos
from hocket.trainer import Trainer
from hocket.trainer.callback import Callback

Kind = Literal["images", "text", "convnet", "transformer"]
BATCH = 8
CLASSES = 4
VOCABULARY = 32
LENGTH = 16


@dataclass(frozen=True)
class Case:
    """A method, and the models and arguments that it runs with."""

    name: str
    make: Callable[[], Any]
    kinds: frozenset[Kind] = frozenset({"images", "text", "convnet", "transformer"})
    pil: bool = False
    """Whether the method transforms single images in the data set."""
    optimizer: Callable[[nn.Module], Any] | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    """Arguments of the trainer under which the method has an effect."""
    epochs: int = 1
    """Number of epochs over which the steps are spread."""


_IMAGES: frozenset[Kind] = frozenset({"images", "convnet"})
_TEXT: frozenset[Kind] = frozenset({"text", "transformer"})
# Methods that change modules, on models that have such modules.
_CONVNET: frozenset[Kind] = frozenset({"convnet"})
_TRANSFORMER: frozenset[Kind] = frozenset({"transformer"})


_BF16 = (("precision", "amp_bf16"),)


def _schedule_free(model: nn.Module) -> Any:
    import schedulefree

    return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case("Alibi", lambda: algos.Alibi(LENGTH, 0.5), _TRANSFORMER),
        Case("AugMix", lambda: algos.AugMix(), _IMAGES, pil=True),
        Case("BlurPool", lambda: algos.BlurPool(min_channels=8), _CONVNET),
        Case("ChannelsLast", lambda: algos.ChannelsLast(), _CONVNET),
        Case("ColOut", lambda: algos.ColOut(0.3, 0.3), _IMAGES),
        Case("CutMix", lambda: algos.CutMix(1.0), _IMAGES),
        Case("CutOut", lambda: algos.CutOut(2, 0.4), _IMAGES),
        Case("EMA", lambda: algos.EMA("2ba")),
        Case(
            "Factorize", lambda: algos.Factorize(min_channels=8, min_features=16, latent_features=4), _CONVNET
        ),
        Case("Float8", lambda: algos.Float8(emulate=True), _TRANSFORMER),
        Case("FusedLayerNorm", lambda: algos.FusedLayerNorm(), _TRANSFORMER),
        Case("GatedLinearUnits", lambda: algos.GatedLinearUnits(), _TRANSFORMER),
        Case("GhostBatchNorm", lambda: algos.GhostBatchNorm(4), _CONVNET),
        Case("GradientClipping", lambda: algos.GradientClipping(clipping_threshold=0.05)),
        Case("GyroDropout", lambda: algos.GyroDropout(0.5, 8, 4), _CONVNET),
        Case("LabelSmoothing", lambda: algos.LabelSmoothing(0.1), _IMAGES),
        Case("LayerFreezing", lambda: algos.LayerFreezing(0.0, 0.9), _CONVNET, epochs=2),
        Case("LoRA", lambda: algos.LoRA(4), _TRANSFORMER),
        Case("LowPrecisionGroupNorm", lambda: algos.LowPrecisionGroupNorm(), _CONVNET, arguments=_BF16),
        Case("LowPrecisionLayerNorm", lambda: algos.LowPrecisionLayerNorm(), _TRANSFORMER, arguments=_BF16),
        Case("MixUp", lambda: algos.MixUp(0.4), _IMAGES),
        Case("NoOpModel", lambda: algos.NoOpModel(), _CONVNET),
        Case("ProgressiveResizing", lambda: algos.ProgressiveResizing(delay_fraction=0.2), _IMAGES),
        Case("QAT", lambda: algos.QAT(group_size=8), _TRANSFORMER),
        Case("QLoRA", lambda: algos.QLoRA(4), _TRANSFORMER),
        Case("RandAugment", lambda: algos.RandAugment(), _IMAGES, pil=True),
        Case("SAM", lambda: algos.SAM(0.5)),
        Case("SWA", lambda: algos.SWA("0.2dur", "0.7dur", "1ba")),
        Case("ScheduleFree", lambda: algos.ScheduleFree(), optimizer=_schedule_free),
        Case("SelectiveBackprop", lambda: algos.SelectiveBackprop(0.0, 1.0, interrupt=3), _IMAGES),
        Case("SeqLengthWarmup", lambda: algos.SeqLengthWarmup(0.5, 8, LENGTH, 4), _TEXT),
        Case("SequencePacking", lambda: algos.SequencePacking(2 * LENGTH), _TEXT),
        Case("SqueezeExcite", lambda: algos.SqueezeExcite(4, 8), _CONVNET),
        Case("StochasticDepth", lambda: algos.StochasticDepth("ResNetBasicBlock", drop_rate=0.5), _CONVNET),
        Case("WeightStandardization", lambda: algos.WeightStandardization(), _CONVNET),
        Case("ZLoss", lambda: algos.ZLoss(1e-2)),
    ]
}
"""Methods whose settings show an effect within four steps."""


class Images(nn.Module):
    """A convolutional classifier of images of any size, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.norm(self.stem(batch[0]))))
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1], reduction=reduction)


class Text(nn.Module):
    """A causal language model of one block; batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        if mask is None or mask.ndim == 2:
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        else:
            mask = mask.expand(-1, 2, -1, -1).flatten(0, 1)
        logits: torch.Tensor = self.head(self.block(self.embedding(ids), src_mask=~mask))
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        losses = nn.functional.cross_entropy(
            outputs[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        if reduction == "none":
            return losses.mean(1)
        counted = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        return losses.sum() / counted


class BasicBlock(nn.Module):
    """A residual block with the submodule names of torchvision's `BasicBlock`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Convnet(Images):
    """A residual network with strides, pooling, group norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            BasicBlock(8), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), BasicBlock(16),
            nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 32),
        )  # fmt: skip


class RMSNorm(nn.Module):
    """A norm written in Python, as those of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Attention(nn.Module):
    """Causal self-attention that ALiBi can change."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.alibi: algos.alibi.AlibiAttention | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention if self.alibi is None else self.alibi
        out = attend(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(batch, length, width)


@algos.alibi.policy_registry.register(Attention)
def _give_alibi(module: Attention, index: int, max_sequence_length: int) -> nn.Module:
    module.alibi = algos.alibi.AlibiAttention(module.num_heads, max_sequence_length)
    return module


class BertIntermediate(nn.Module):
    """The first half of a feed-forward layer, with the names of transformers' `BertIntermediate`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, hidden)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class Transformer(Text):
    """A causal language model with position embeddings, built of modules that the methods support."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding(2 * LENGTH, 16)  # as long as packed sequences
        self.attention_norm, self.attention = nn.LayerNorm(16), Attention(16, 2)
        self.mlp_norm = RMSNorm(16)
        self.mlp = nn.Sequential(BertIntermediate(16, 32), nn.Linear(32, 16))
        del self.block

    def forward(self, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        x = self.embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        logits: torch.Tensor = self.head(x)
        return logits


MODELS: dict[Kind, Callable[[], nn.Module]] = {
    "images": Images, "text": Text, "convnet": Convnet, "transformer": Transformer
}  # fmt: skip


class ImageData(Dataset[Any]):
    """Images with an optional transform, as in torchvision's data sets; PIL images if `pil`."""

    def __init__(self, size: int, *, pil: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.randint(0, 256, (size, 3, 16, 16), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(0, CLASSES, (size,), generator=generator)
        self.transform: Any = None
        if pil:
            from torchvision.transforms import Compose, ToTensor

            self.transform = Compose([ToTensor()])
        self.pil = pil

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        image: Any = self.pixels[index]
        if self.pil:
            from PIL import Image

            image = Image.fromarray(image.permute(1, 2, 0).numpy())
        else:
            image = image.float() / 255
        return (image if self.transform is None else self.transform(image)), self.labels[index]


class TextData(Dataset[Any]):
    """Token ids with labels and padding."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        mask = torch.arange(LENGTH) < self.lengths[index]
        ids = self.ids[index].masked_fill(~mask, 0)
        labels = ids.masked_fill(~mask, -100)
        labels[0] = -100  # no token predicts the first one; losses are weighted by the labels that count
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class LoaderOf:
    """A loader with a `data_parallel` attribute: the data-parallel rank, and the number of such ranks."""

    def __init__(self, loader: DataLoader[Any], data_parallel: tuple[int, int]) -> None:
        self.loader, self.data_parallel, self.dataset = loader, data_parallel, loader.dataset

    def __iter__(self) -> Any:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class Losses(Callback):
    """Keeps each step's loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.losses.append(float(state.loss))


def make_model(kind: Kind, seed: int = 1) -> nn.Module:
    """Make the tiny model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[kind]()


def make_loader(
    kind: Kind, steps: int, *, pil: bool = False, shuffle: bool = True, ranks: tuple[int, int] = (0, 1)
) -> LoaderOf:
    """Make a loader of `steps` batches; each rank reads its own rows of them."""
    size = BATCH * steps
    is_image = kind in ("images", "convnet")
    data: Any = ImageData(size, pil=pil) if is_image else TextData(size)
    rank, world = ranks
    if world > 1:
        part = BATCH // world
        rows = [BATCH * step + part * rank + row for step in range(steps) for row in range(part)]
        data = torch.utils.data.Subset(data, rows)
    loader = DataLoader(data, batch_size=BATCH // world, shuffle=shuffle)
    return LoaderOf(loader, ranks)


def train(
    names: Sequence[str],
    *,
    kind: Kind | None = None,
    steps: int = 4,
    ranks: tuple[int, int] = (0, 1),
    algorithms: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    look: Callable[[Trainer], None] | None = None,
    shuffle: bool = True,
    callbacks_more: Sequence[Any] = (),
    **arguments: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with the named methods for a few steps; return whole parameters and buffers, and the losses."""
    cases = [CASES[name] for name in names]
    kind = kind or common_kind(names)
    assert kind is not None
    random.seed(11)
    model = make_model(kind) if model is None else model
    watch = Losses()
    makes = [case.optimizer for case in cases if case.optimizer is not None]
    optimizer = makes[0](model) if makes else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {
        "train_dataloader": make_loader(
            kind,
            steps // max((case.epochs for case in cases), default=1),
            pil=any(case.pil for case in cases),
            ranks=ranks,
            shuffle=shuffle,
        ),
        "max_duration": f"{steps}ba",
        "device": "cpu",
        "progress_bar": False,
        "seed": 7,
        **{name: value for case in cases for name, value in case.arguments},
        **arguments,
    }
    with Trainer(
        model=model,
        optimizers=optimizer,
        algorithms=[case.make() for case in cases] if algorithms is None else list(algorithms),
        callbacks=[watch, *callbacks_more],
        **options,
    ) as trainer:
        trainer.fit()
        if look is not None:
            look(trainer)
        return whole(trainer.state.model), watch.losses


def common_kind(names: Sequence[str]) -> Kind | None:
    """Return a kind of model that all the methods run with, if there is one."""
    kinds = frozenset[Kind](MODELS).intersection(*(CASES[name].kinds for name in names))
    return next((kind for kind in MODELS if kind in kinds), None)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's whole parameters and buffers, gathered where they are sharded."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in tensors.items()
    }
