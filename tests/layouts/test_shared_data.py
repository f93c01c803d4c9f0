"""Ranks that share their data, as tensor-parallel ones do, agree on all that a run decides."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.torch import StreamingDataLoader
from hocket.trainer import Callback, Trainer
from hocket.trainer.errors import DataError
from support import layouts
from support.standing_ranks import StandingRanks


class StopOnOneRank(Callback):
    """Requests a stop on the last process alone, which has no data of its own."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if dist.get_rank() == 3 and state.timestamp.counts.batch == 1:
            state.stop_training("one rank asks for it")


class OwnSamples(IterableDataset):
    """Samples that differ between processes."""

    def __iter__(self) -> Any:
        samples = layouts.samples("gpt", 2)
        return iter(samples[dist.get_rank() :])


def _make(loader: DataLoader, config: dict[str, Any], **options: Any) -> Trainer:
    model = layouts.build("gpt")
    arguments = {"max_duration": "6ba", "progress_bar": False, "device": "cpu", "parallelism_config": config}
    return Trainer(model=model, train_dataloader=loader, **arguments | options)


def _agree(config: dict[str, Any]) -> tuple[Any, ...]:
    """Train without a seed until one process asks for the end; return what all ranks have to agree on."""
    torch.seed()  # each process has other random numbers before the trainer is made
    loader = DataLoader(layouts.samples("gpt", 6), batch_size=4, shuffle=True)
    with contextlib.closing(_make(loader, config, callbacks=[StopOnOneRank()])) as trainer:
        trainer.fit()
        state = trainer.state
        return state.seed, state.run_name, state.timestamp.counts.batch, state.timestamp.counts.sample


@pytest.mark.parametrize(("config", "size"), [({"dp_shard": 1, "tp": 4}, 1), ({"dp_shard": 2, "tp": 2}, 2)])
def test_ranks_that_share_data_agree(four_ranks: StandingRanks, config: dict[str, Any], size: int) -> None:
    results = four_ranks.run(_agree, config)
    assert set(results) == {results[0]}
    _, _, batches, num_samples = results[0]
    assert batches < 6, "the request of one process did not end the run"
    assert num_samples == batches * 4 * size


def _differ() -> str:
    loader = DataLoader(OwnSamples(), batch_size=4)
    with contextlib.closing(_make(loader, {"dp_shard": 1, "tp": 4})) as trainer:
        with pytest.raises(DataError) as caught:
            trainer.fit()
        return str(caught.value)


def test_ranks_that_share_matrices_but_not_batches_are_refused(four_ranks: StandingRanks) -> None:
    for message in four_ranks.run(_differ):
        assert "ranks 0 and 1 share the matrices of the model, so they need the same batches" in message


class SeenSamples(Callback):
    """The numbers of the samples of each batch, of training and of evaluation."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.seen.append(state.batch["id"].tolist())

    def eval_batch_start(self, state: Any, logger: Any) -> None:
        self.seen.append(state.batch["id"].tolist())


class OwnItems(StreamingDataset):
    """A data set of the user's own class."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index)


def _write(folder: Path, count: int) -> str:
    columns = {"id": "int", "tokens": "ndarray:uint8:9"}
    samples = layouts.samples("gpt", count // layouts.GLOBAL_BATCH)
    with MDSWriter(columns=columns, out=str(folder)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"id": number, "tokens": sample["tokens"].numpy()})
    return str(folder)


def _stream(kind: str, folder: str, **options: Any) -> Any:
    """Return a loader of batches of 4 samples on each data-parallel rank."""
    options = {"local": folder, "shuffle": True, "shuffle_seed": 3} | options
    if kind == "loader":
        return StreamingDataLoader(StreamingDataset(**options), batch_size=4)
    if kind == "global batch":
        return StreamingDataLoader(StreamingDataset(global_batch_size=8, **options))
    made = OwnItems if kind == "own class" else StreamingDataset
    return DataLoader(made(batch_size=4, **options), batch_size=4, num_workers=2 if kind == "workers" else 0)


def _train_on_stream(kind: str, folder: str) -> list[list[int]]:
    callback = SeenSamples()
    loader, eval_loader = _stream(kind, folder), _stream("loader", folder)
    config = {"dp_shard": 2, "tp": 2}
    options = {"callbacks": [callback], "eval_dataloader": eval_loader, "eval_interval": "1ep"}
    with contextlib.closing(_make(loader, config, max_duration="1ep", **options)) as trainer:
        trainer.fit()
    return callback.seen


@pytest.mark.parametrize("kind", ["workers", "loader", "global batch", "own class"])
def test_a_streaming_data_set_follows_the_mesh(four_ranks: StandingRanks, tmp_path: Path, kind: str) -> None:
    folder = _write(tmp_path / "data", 32)
    found = four_ranks.run(_train_on_stream, kind, folder)
    for rank, seen in enumerate(found):
        given = {"rank": rank // 2, "world_size": 2}
        alone = [
            [int(number) for number in batch["id"]]
            for loader in (_stream(kind, folder, **given), _stream("loader", folder, **given))
            for batch in loader
        ]
        assert seen == alone
    assert found[0] != found[2]


def _refuse_numbers(folder: str) -> str:
    loader = _stream("loader", folder, replication=1)
    with pytest.raises(DataError) as caught:
        _make(loader, {"dp_shard": 2, "tp": 2})
    return str(caught.value)


def test_given_numbers_of_a_streaming_data_set_are_kept(four_ranks: StandingRanks, tmp_path: Path) -> None:
    for message in four_ranks.run(_refuse_numbers, _write(tmp_path / "data", 16)):
        assert "of the parallelism, or its `replication`, which is 2 here" in message
