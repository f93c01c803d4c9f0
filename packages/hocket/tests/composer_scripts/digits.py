"""A classifier of scikit-learn's digits in Composer's style; `python digits.py FOLDER EPOCHS [LOAD_PATH]`."""

import sys
from pathlib import Path

import composer
import composer.functional as cf
import torch
from composer.algorithms import LabelSmoothing, MixUp
from composer.callbacks import LRMonitor, MLPerfCallback, SpeedMonitor  # noqa: F401 - imported, never used
from composer.core import DataSpec, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel
from composer.optim import DecoupledSGDW, LinearWithWarmupScheduler
from composer.utils import dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Count(composer.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def run_event(self, event, state, logger):
        self.batches += event == Event.BATCH_END


folder, epochs, load_path = Path(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or [None])[0]
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images[:512] / 16.0, dtype=torch.float32), torch.tensor(labels[:512]))
loader = DataLoader(dataset, batch_size=64, sampler=dist.get_sampler(dataset, shuffle=True))
torch.manual_seed(17)
module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
cf.apply_channels_last(module)
model = ComposerClassifier(module=module, num_classes=10)
assert isinstance(model, ComposerModel)
logged, counted = InMemoryLogger(), Count()
trainer = composer.Trainer(
    model=model,
    train_dataloader=DataSpec(loader),
    eval_dataloader=DataLoader(dataset, batch_size=256),
    optimizers=DecoupledSGDW(model.parameters(), lr=0.5, momentum=0.9),
    schedulers=LinearWithWarmupScheduler(t_warmup="4ba", t_max="4ep"),
    max_duration=epochs,
    algorithms=[MixUp(num_classes=10, alpha=0.2), LabelSmoothing(alpha=0.1)],
    callbacks=[LRMonitor(), SpeedMonitor(window_size=4), counted],
    loggers=[logged],
    grad_accum=2,
    precision="bf16",
    device="cpu",
    progress_bar=False,
    seed=17,
    save_folder=str(folder / "checkpoints"),
    save_filename="ep{epoch}-ba{batch}-rank{rank}.pt",
    save_interval="1ep",
    save_num_checkpoints_to_keep=2,
    load_path_format=load_path,
)
microbatch = trainer.state.device_train_microbatch_size
trainer.fit()
trainer.close()
accuracy = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute().item()
print(f"batches={counted.batches} at={trainer.state.timestamp.batch.value} microbatch={microbatch}")
print(f"accuracy={accuracy:.4f} names={sorted(logged.data)}")
