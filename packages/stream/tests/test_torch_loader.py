"""The data set in torch's `DataLoader` and in torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hocket.stream import StreamingDataset
from hocket.stream.errors import ConfigError


def collate_ids(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["id"] for sample in samples]


def open_data(folder: str, **options: Any) -> StreamingDataset:
    return StreamingDataset(local=folder, shuffle=True, shuffle_block_size=16, **{"batch_size": 8} | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_the_planned_order(write: Callable[..., str], workers: int) -> None:
    dataset = open_data(write(83))
    assert isinstance(dataset, IterableDataset)
    loader = DataLoader(dataset, batch_size=8, num_workers=workers, collate_fn=collate_ids)
    for epoch in range(2):
        assert list(loader) == [dataset.sample_ids(number, epoch=epoch) for number in range(11)]


def test_another_batch_size_still_gives_each_sample_once(write: Callable[..., str]) -> None:
    folder = write(83)
    seen: list[int] = []
    for rank in (0, 1):
        dataset = open_data(folder, batch_size=4, rank=rank, world_size=2)
        loader = DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=collate_ids)
        mine = [number for batch in loader for number in batch]
        assert len(mine) == len(dataset)
        seen += mine
    assert sorted(seen) == list(range(83))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_the_epochs_in_turn(write: Callable[..., str], persistent: bool) -> None:
    dataset = open_data(write(83))
    expected = [[dataset.sample_ids(number, epoch=epoch) for number in range(11)] for epoch in range(5)]
    loader = DataLoader(
        dataset, batch_size=8, num_workers=2, collate_fn=collate_ids, persistent_workers=persistent
    )
    batches = iter(loader)
    assert [next(batches), next(batches)] == expected[0][:2]
    del batches
    assert list(loader) == expected[1]
    assert [batch["id"].tolist() for batch in dataset.batches()] == expected[2]
    dataset.load_state_dict(dataset.state_dict() | {"epoch": 3, "batch": 4})
    assert list(loader) == expected[3][4:]
    assert list(loader) == expected[4]
    dataset.set_epoch(1)
    assert list(loader) == expected[1]
    del loader


def test_two_concurrent_iterations_read_an_epoch_each(write: Callable[..., str]) -> None:
    dataset = open_data(write(83))
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate_ids)
    found = [list(batches) for batches in zip(*zip(loader, loader, strict=True), strict=True)]
    assert sorted(found) == sorted(
        [dataset.sample_ids(number, epoch=epoch) for number in range(11)] for epoch in (0, 1)
    )


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.slow
def test_workers_start_by_any_method(write: Callable[..., str], context: str) -> None:
    dataset = open_data(write(40))
    loader = DataLoader(
        dataset,
        batch_size=8,
        num_workers=1,
        collate_fn=list,  # a new process cannot import a test module
        multiprocessing_context=context,
        timeout=90,
    )
    for epoch in (0, 1):
        batches = [[int(sample["id"]) for sample in batch] for batch in loader]
        assert batches == [dataset.sample_ids(number, epoch=epoch) for number in range(5)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize(("workers", "size"), [(0, 8), (0, 5), (2, 8), (2, 5)])
def test_a_stateful_loader_resumes_exactly(write: Callable[..., str], workers: int, size: int) -> None:
    folder = write(83)

    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            open_data(folder), batch_size=size, num_workers=workers, collate_fn=collate_ids
        )

    whole = list(make())
    assert sorted(number for batch in whole for number in batch) == list(range(83))
    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(4)]
    state = loader.state_dict()
    del iterator, loader
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    second_iterator = iter(resumed)
    second = [next(second_iterator) for _ in range(3)]
    state = resumed.state_dict()
    del second_iterator, resumed
    last = make()
    last.load_state_dict(state)
    assert first + second + list(last) == whole


def test_the_data_set_has_the_position_of_a_resumed_iterator(write: Callable[..., str]) -> None:
    folder = write(83)
    iterator = iter(open_data(folder))
    taken = [int(next(iterator)["id"]) for _ in range(3 * 8 + 2)]
    resumed = open_data(folder)
    second = iter(resumed)
    second.load_state_dict(iterator.state_dict())
    taken.append(int(next(second)["id"]))
    assert resumed.state_dict()["batch"] == 3
    last = open_data(folder)
    last.load_state_dict(resumed.state_dict())
    rest = [int(sample["id"]) for sample in last]
    assert sorted(taken[: 3 * 8] + rest) == list(range(83))


def test_an_iterator_refuses_the_state_of_another_worker(write: Callable[..., str]) -> None:
    dataset = open_data(write(20))
    iterator = iter(dataset)
    next(iterator)
    state = iterator.state_dict()
    with pytest.raises(ConfigError, match="of worker \\[1, 2\\]"):
        iter(dataset).load_state_dict(state | {"worker": [1, 2]})
    with pytest.raises(ConfigError, match="expected the keys"):
        iter(dataset).load_state_dict({"version": 1})


LATE = """
import sys
from hocket.stream import StreamingDataset
dataset = StreamingDataset(local=sys.argv[1], batch_size=8)
assert "torch" not in sys.modules
from torch.utils.data import DataLoader
next(iter(DataLoader(dataset, batch_size=8)))
"""


@pytest.mark.slow
def test_importing_torch_after_making_the_data_set_raises(write: Callable[..., str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, write(20)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "import torch before making the data set" in done.stderr
