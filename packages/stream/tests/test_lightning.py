"""Lightning's Trainer reads a data set through torch's own DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hocket.stream import StreamingDataLoader, StreamingDataset

pytestmark = [
    pytest.mark.slow,
    # Lightning uses deprecated parts of torch and of itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
lightning = pytest.importorskip("lightning.pytorch", reason="needs `uv sync --group lightning`")


class Reader(lightning.LightningModule):  # type: ignore[misc]
    """A model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        self.seen.append(batch["id"].tolist())
        return self.layer(batch["tokens"].float()).square().mean()

    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        self.validated.append(batch["id"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


def make_trainer(folder: Path, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(loader: Any, folder: Path, **options: Any) -> list[list[int]]:
    model = Reader()
    make_trainer(folder, **options).fit(model, loader)
    return model.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_through_torchs_loader_is_in_the_planned_order(
    write: Callable[..., str], tmp_path: Path, workers: int
) -> None:
    dataset = StreamingDataset(local=write(80), batch_size=8, shuffle=True, shuffle_block_size=16)
    expected = [dataset.sample_ids(number, epoch=epoch) for epoch in range(2) for number in range(10)]
    loader = DataLoader(dataset, batch_size=8, num_workers=workers)
    assert fit(loader, tmp_path, max_epochs=2) == expected


@pytest.mark.parametrize("kind", [DataLoader, StreamingDataLoader])
def test_validation_after_the_sanity_check_reads_every_batch(
    write: Callable[..., str], tmp_path: Path, kind: Any
) -> None:
    folder = write(80)
    train, val = (StreamingDataset(local=folder, batch_size=8) for _ in range(2))
    batch_size = {"batch_size": 8}
    model = Reader()
    trainer = make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(model, kind(train, **batch_size), kind(val, **batch_size))
    in_order = [list(range(first, first + 8)) for first in range(0, 80, 8)]
    assert model.validated == in_order[:2] + in_order + in_order
    assert model.seen == in_order + in_order


def test_our_loader_continues_with_the_next_epoch_and_from_a_state(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write(83)
    options: dict[str, Any] = {"local": folder, "batch_size": 8, "shuffle": True, "shuffle_block_size": 16}
    dataset = StreamingDataset(**options)
    expected = [dataset.sample_ids(number, epoch=epoch) for epoch in range(3) for number in range(11)]
    loader = StreamingDataLoader(dataset)
    assert fit(loader, tmp_path, max_epochs=2) == expected[:22]
    assert fit(loader, tmp_path, max_epochs=1, limit_train_batches=5) == expected[22:27]
    resumed = StreamingDataLoader(StreamingDataset(**options))
    resumed.load_state_dict(loader.state_dict())
    assert fit(resumed, tmp_path, max_epochs=1) == expected[27:]
