"""The trainer reads a whole epoch of a data set from which a batch was read before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.recipes.cli import app
from hocket.recipes.samples import samples_of
from hocket.stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.trainer import Trainer
from hocket.trainer.errors import DataError
from support.ranks import run_ranks


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


def write(folder: Path, numbers: range) -> Path:
    with MDSWriter(columns={"id": "int"}, out=folder, size_limit=400) as writer:
        for number in numbers:
            writer.write({"id": number})
    return folder


def trained(folder: Path, loader: Any, duration: str = "24ba", **options: Any) -> list[int]:
    """Train, and return the samples seen so far in this call."""
    net = Net()
    options = {"save_interval": "7ba", "autoresume": True, **options}
    with Trainer(
        model=net,
        train_dataloader=loader,
        max_duration=duration,
        save_folder=folder,
        progress_bar=False,
        **options,
    ) as trainer:
        trainer.fit()
    return net.seen


def test_the_samples_of_every_step_are_named_from_the_checkpoints(tmp_path: Path) -> None:
    data = [write(tmp_path / "a", range(50)), write(tmp_path / "b", range(50, 83))]

    def loader(**options: Any) -> StreamingDataLoader:
        streams = [Stream(local=folder) for folder in data]
        return StreamingDataLoader(
            StreamingDataset(streams=streams, global_batch_size=8, shuffle=True, **options)
        )

    run = tmp_path / "run"
    # Epochs of 11 batches, the last with 3 samples; the run is stopped once and goes on.
    seen = trained(run, loader(), "16ba") + trained(run, loader())
    begin = 0
    for step in range(1, 25):
        found = samples_of(run, step, data=data)
        size = 3 if step % 11 == 0 else 8
        assert (found.epoch, found.batch) == divmod(step - 1, 11)
        assert [place.number for place in found.samples] == seen[begin : begin + size]
        begin += size
        parts = [samples_of(run, step, data=data, rank=rank, num_ranks=5).samples for rank in range(5)]
        assert [place for part in parts for place in part] == found.samples
        # Each checkpoint alone gives the same, whatever lies between it and the step.
        for uri in (run / "ep0-ba7", run / "ep2-ba24"):
            assert samples_of(uri, step, data=data).samples == found.samples
    assert begin == len(seen)
    # The places are those of the samples.
    streams = {str(folder): StreamingDataset(local=folder) for folder in data}
    for place in found.samples:
        rows = streams[place.origin].places(range(streams[place.origin].size))
        (number,) = [one.number for one in rows if (one.shard, one.row) == (place.shard, place.row)]
        assert streams[place.origin][number]["id"] == place.number
    args = ["samples", str(run), "--step", "11", *(f"--data={folder}" for folder in data)]
    output = CliRunner().invoke(app, [*args, "--rank", "0"]).output
    assert output.startswith("step 11: batch 10 of epoch 0, rank 0 of 1, 3 samples\n")
    for options, error, match in (
        ({"data": data[:1]}, StateMismatchError, "fingerprint"),
        ({"data": data[::-1]}, StateMismatchError, "fingerprint"),
        ({}, ConfigError, "either `data` or `dataset`"),
        ({"data": data, "rank": 1}, ConfigError, "`rank` is 1 of 1"),
    ):
        with pytest.raises(error, match=match):
            samples_of(run, 3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`step` is 0"):
        samples_of(run, 0, data=data)
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        samples_of(tmp_path, 1, data=data)
    output = CliRunner().invoke(app, ["samples", str(tmp_path), *args[2:]]).output
    assert "no committed checkpoint" in " ".join(output.split())  # long paths are wrapped


def test_a_run_that_left_the_order_is_refused_by_name(tmp_path: Path) -> None:
    data = write(tmp_path / "data", range(40))

    def loader() -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(local=data, global_batch_size=8, shuffle=True))

    # Epochs of 4 batches in place of 5, saved after steps 3, 6 and 9.
    options = {"save_interval": "3ba", "train_subset_num_batches": 4}
    seen = trained(tmp_path / "cut", loader(), "9ba", **options)
    for step in (1, 2, 3, 5, 6, 9):
        found = samples_of(tmp_path / "cut", step, data=[data])
        assert [place.number for place in found.samples] == seen[8 * step - 8 : 8 * step]
    for step in (4, 8):
        with pytest.raises(CheckpointIncompatibleError, match="epochs were cut short"):
            samples_of(tmp_path / "cut", step, data=[data])
    with pytest.raises(CheckpointIncompatibleError, match="in another epoch, are not known from it"):
        samples_of(tmp_path / "cut", 14, data=[data])
    plain = torch.utils.data.DataLoader([{"id": number} for number in range(40)], batch_size=8)
    trained(tmp_path / "plain", plain, "2ba")
    with pytest.raises(CheckpointIncompatibleError, match=r"no position in the order of `hocket\.stream`"):
        samples_of(tmp_path / "plain", 1, data=[data])


def _train_with_own_phase(folder: str) -> tuple[str, list[int]]:
    from torch import distributed

    told = ""
    for start in (4 + distributed.get_rank(), 4):
        streams = [Stream(local=f"{folder}/a"), Stream(local=f"{folder}/b")]
        weights: Any = [(0, {"a": 1, "b": 0}), (f"{start}ba", {"a": 0, "b": 1})]
        loader = StreamingDataLoader(
            StreamingDataset(streams=streams, global_batch_size=8, epoch_size=64, weights=weights)
        )
        try:
            with Trainer(
                model=(net := Net()), train_dataloader=loader, max_duration="8ba", progress_bar=False
            ) as trainer:
                trainer.fit()
        except DataError as error:
            told = str(error)
    return told, net.seen


@pytest.mark.slow
def test_a_phase_that_differs_over_ranks_is_refused_on_all_and_an_equal_one_begins_at_its_batch(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a", range(50))
    write(tmp_path / "b", range(100, 150))
    found = run_ranks(_train_with_own_phase, 2, str(tmp_path), init="gloo", timeout_s=120)
    for told, seen in found:
        assert "ranks 0 and 1 read in different orders" in told
        assert [number >= 100 for number in seen] == [False] * 16 + [True] * 16
