"""The trainer reads a whole epoch of a data set from which a batch was read before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.trainer import Trainer


class Net(torch.nn.Module):
    """A model that records its training samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen += batch["id"].tolist()
        return self.layer(batch["id"].float()[:, None])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


def test_reading_a_batch_before_training_does_not_consume_it(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "data", size_limit=400) as writer:
        for number in range(80):
            writer.write({"id": number})
    dataset = StreamingDataset(local=tmp_path / "data", batch_size=8, shuffle=True)
    loader = StreamingDataLoader(dataset)
    next(iter(loader))
    trainer = Trainer(model=(net := Net()), train_dataloader=loader, max_duration="2ep", progress_bar=False)
    trainer.fit()
    trainer.close()
    assert net.seen == [
        sample
        for epoch in (1, 2)
        for number in range(10)
        for sample in dataset.sample_ids(number, epoch=epoch)
    ]
