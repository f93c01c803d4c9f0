"""Ranks that share their data, as tensor-parallel ones do, agree on all that a run decides."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

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
