"""An image classifier on a data set streamed from a bucket; `python images.py REMOTE LOCAL MAX_DURATION`."""

import sys
import warnings
from pathlib import Path

import torch
from composer import Trainer
from composer.algorithms import BlurPool, ChannelsLast, LabelSmoothing, LayerFreezing, MixUp
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW
from composer.utils import dist
from streaming import StreamingDataset
from torch import nn
from torch.utils.data import DataLoader


class Images(StreamingDataset):
    """Images with their classes, as tensors."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return torch.from_numpy(sample["image"]).float().div(255).permute(2, 0, 1), sample["label"]


warnings.simplefilter("ignore")
remote, local, max_duration = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(17)
train_dataset = Images(remote=f"{remote}/train", local=str(local / "train"), batch_size=16, shuffle=True)
eval_dataset = Images(remote=f"{remote}/val", local=str(local / "val"), batch_size=16)
module = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 4),
)
model = ComposerClassifier(module, num_classes=4)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=16),
    eval_dataloader=DataLoader(eval_dataset, batch_size=16),
    max_duration=max_duration,
    optimizers=DecoupledSGDW(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="1ep", alpha_f=0.1),
    algorithms=[
        ChannelsLast(),
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True),
        MixUp(alpha=0.2),
        LabelSmoothing(smoothing=0.1),
        LayerFreezing(freeze_start=0.5, freeze_level=0.5),
    ],
    callbacks=[SpeedMonitor(window_size=4), LRMonitor()],
    device="cpu",
    progress_bar=False,
    seed=17,
)
trainer.fit()
accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item()
trainer.close()
frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
blurred = sum(type(layer).__name__.startswith("Blur") for layer in model.modules())
if dist.get_global_rank() == 0:
    timestamp = trainer.state.timestamp
    print(f"ranks={dist.get_world_size()} batches={timestamp.batch.value} samples={timestamp.sample.value}")
    is_head_frozen = "module.8.weight" in frozen
    print(f"accuracy={accuracy:.3f} blurred={blurred} frozen={bool(frozen)} head_is_frozen={is_head_frozen}")
    sys.stdout.flush()
