"""A training whose rank 1 dies again and again, for `tests/bench/recovery.py`: `SYSTEM FOLDER DEATHS`.

Attempt k dies after step 10 k + 7, two steps after a checkpoint. Each rank writes the time of each step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAVE_EVERY = 5
BATCH_SIZE = 8


def end_of_step(folder: Path, deaths: int, step: int) -> None:
    """Write the time of a step, and die where this attempt is to die."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    with (folder / f"steps-{attempt}-{rank}").open("a") as file:
        print(step, time.time(), file=file)
    if rank == "1" and attempt < deaths and step == 10 * attempt + 7:
        (folder / f"killed-{attempt}").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def model() -> nn.Module:
    """Return a small transformer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 8))


def loader() -> DataLoader:
    """Return batches of random numbers."""
    numbers = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(512, 16, 128, generator=numbers), torch.randn(512, 16, 8, generator=numbers)
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH_SIZE)


def hocket(folder: Path, deaths: int) -> None:
    """Train with Hocket's trainer, sharded."""
    from hocket.trainer import Callback, ComposerModel, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.module = model()

        def forward(self, batch):
            return self.module(batch[0])

        def loss(self, outputs, batch):
            return (outputs - batch[1]).square().mean()

    class Steps(Callback):
        def batch_end(self, state, logger):
            end_of_step(folder, deaths, state.timestamp.batch.value)

    trained = Model()
    with Trainer(
        model=trained,
        train_dataloader=loader(),
        optimizers=torch.optim.AdamW(trained.parameters()),
        max_duration=f"{10 * deaths + SAVE_EVERY}ba",
        callbacks=Steps(),
        fsdp_config={},
        save_folder=str(folder / "checkpoints"),
        save_interval=f"{SAVE_EVERY}ba",
        autoresume=True,
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()


def lightning(folder: Path, deaths: int) -> None:
    """Train with Lightning, replicated, which resumes from its last checkpoint by `ckpt_path="last"`."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = model()

        def training_step(self, batch, _):
            return (self.module(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_):
            end_of_step(folder, deaths, self.trainer.global_step)

    saves = ModelCheckpoint(
        dirpath=folder / "checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=10 * deaths + SAVE_EVERY,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(Model(), loader(), ckpt_path="last")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"hocket": hocket, "lightning": lightning}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
