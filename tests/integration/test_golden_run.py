"""A run and a data set that an earlier version wrote open and go on: the same samples, the same weights.

`golden/run` and `golden/data_set` are never written again: a difference from them is a change of the format.
They were written by `write_data_set`, and by `train` for 4 of 8 batches with a `save_folder`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hocket.ckpt
from hocket.algos import EMA
from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset
from hocket.trainer import Callback, ComposerModel, Trainer
from hocket.trainer.callbacks import SpeedMonitor
from hocket.trainer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW

GOLDEN = Path(__file__).parent / "golden"
# The samples of each batch, by number, over one epoch and a part of the next.
BATCHES = [
    [12, 17, 4, 8], [13, 18, 1, 9], [10, 16, 3, 5], [11, 15, 2, 7], [14, 19, 0, 6], [1, 12, 7, 16],
    [2, 10, 5, 19], [3, 14, 9, 17],
]  # fmt: skip


def samples() -> list[dict[str, Any]]:
    draw = np.random.Generator(np.random.PCG64(5))
    values = (draw.integers(-8, 8, 5) / 8 for _ in range(20))
    return [
        {"number": n, "x": x.astype(np.float32), "name": f"sample {n} é", "label": n % 3, "raw": bytes([n])}
        for n, x in enumerate(values)
    ]


def write_data_set(folder: Path) -> None:
    columns = {"number": "int", "x": "ndarray:float32:5", "name": "str", "label": "int", "raw": "bytes"}
    options: dict[str, Any] = {"compression": "zstd", "hashes": ["xxh3_64"], "size_limit": 600}
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for sample in samples():
            writer.write(sample)


class Net(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch["label"])


class Seen(Callback):
    """Records the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.batches.append(state.batch["number"].tolist())


def train(cache: Path, end: str, **arguments: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Train on the golden data set until `end`; return the samples of each batch, and the weights."""
    remote = str(GOLDEN / "data_set")
    data = StreamingDataset(remote=remote, local=str(cache), batch_size=4, shuffle=True, shuffle_seed=9)
    model, seen = Net(), Seen()
    with Trainer(
        model=model,
        train_dataloader=StreamingDataLoader(data),
        optimizers=DecoupledAdamW(model.parameters(), lr=0.05),
        schedulers=CosineAnnealingWithWarmupScheduler("2ba", t_max="8ba"),
        algorithms=EMA(half_life="3ba"),
        callbacks=[seen, SpeedMonitor(window_size=2)],
        max_duration=end,
        run_name="golden",
        seed=4,
        device="cpu",
        progress_bar=False,
        **arguments,
    ) as trainer:
        trainer.fit()
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return seen.batches, weights


def test_a_golden_data_set_is_read_and_written(tmp_path: Path) -> None:
    read = list(
        StreamingDataset(remote=str(GOLDEN / "data_set"), local=str(tmp_path / "cache"), batch_size=4)
    )
    for found, sample in zip(read, samples(), strict=True):
        assert found.keys() == sample.keys()
        for name, value in sample.items():
            np.testing.assert_array_equal(found[name], value)
    write_data_set(tmp_path / "data_set")
    written, golden = (
        json.loads((folder / "data_set/index.json").read_text()) for folder in (tmp_path, GOLDEN)
    )
    for index in (written, golden):
        for shard in index["shards"]:
            del shard["zip_data"]  # another version of zstd may compress otherwise
    assert written == golden


def test_a_golden_run_goes_on(tmp_path: Path) -> None:
    batches, weights = train(tmp_path / "whole", "8ba")
    assert batches == BATCHES
    rest, resumed = train(tmp_path / "rest", "8ba", load_path=str(GOLDEN / "run"))
    assert rest == BATCHES[4:]
    for name, value in weights.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_golden_run_opens_without_the_trainer() -> None:
    checkpoint = hocket.ckpt.open(GOLDEN / "run")
    assert checkpoint.manifest.step == 4
    assert hocket.ckpt.verify(GOLDEN / "run").is_sound
    assert {name.partition(".")[0] for name in checkpoint} >= {"model", "optimizers", "algorithms"}
