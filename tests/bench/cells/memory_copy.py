"""A training with copies in memory, for `tests/bench/recovery.py --copies`: `FOLDER MIB COPIES`.

Each rank has MIB of parameters and optimizer state. After every batch the trainer copies the state to memory,
and the ranks then copy the same tensors into memory that is allocated already. After the last copy rank 1
dies, and the next attempt goes on from the copy. Rank 0 writes the seconds of each to `FOLDER/figures`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.trainer import Callback, ComposerModel, Trainer
from hocket.trainer.checkpoint.ephemeral import CopyCheckpointer

WIDTH = 1024


class Model(ComposerModel):
    """Linear layers, so many that each of two ranks has MIB of their parameters and AdamW's moments."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        layer_mib = 3 * 4 * WIDTH * WIDTH / 2**20 / 2
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(mib / layer_mib)))
        )

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


class Figures(Callback):
    """Times the copies of the trainer, and plain copies of the same bytes."""

    def __init__(self, folder: Path, copies: int) -> None:
        self.folder = folder
        self.count = copies
        self.into: list[torch.Tensor] = []
        self.stalls: list[float] = []
        self.plain: list[float] = []
        save = CopyCheckpointer.save

        def timed(copier: CopyCheckpointer):
            begun = time.perf_counter()
            handle = save(copier)
            self.stalls.append(time.perf_counter() - begun)
            return handle

        CopyCheckpointer.save = timed  # type: ignore[method-assign]

    def batch_start(self, state, logger):
        """Copy the tensors by hand, and die after the last copy."""
        if not self.stalls:
            return
        optimizer = state.optimizers[0]
        tensors = [value for group in optimizer.param_groups for value in group["params"]]
        tensors += [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
        if not self.into:
            self.into = [torch.empty_like(value).fill_(1) for value in tensors]
        begun = time.perf_counter()
        for into, value in zip(self.into, tensors, strict=True):
            into.copy_(value)
        self.plain.append(time.perf_counter() - begun)
        if len(self.plain) < self.count or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        if os.environ["RANK"] == "0":
            num_bytes = sum(value.nbytes for value in tensors)
            figures = {"bytes": num_bytes, "stall": self.stalls, "plain": self.plain}
            (self.folder / "figures").write_text(json.dumps(figures))
        else:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, mib: int, copies: int) -> None:
    """Train until the copies are made, and one batch after the restart."""
    torch.manual_seed(0)
    model = Model(mib)
    data = TensorDataset(torch.randn(64, WIDTH), torch.randn(64, WIDTH))
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=1),
        optimizers=torch.optim.AdamW(model.parameters()),
        max_duration=f"{copies + 2}ba",
        callbacks=Figures(folder, copies),
        fsdp_config={},
        save_folder=str(folder / "checkpoints"),
        save_interval="1000ba",
        autoresume=True,
        checkpointing={"ephemeral": "1ba"},
        progress_bar=False,
        device="cpu",
    ) as trainer:
        trainer.fit()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
