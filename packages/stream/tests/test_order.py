"""Global batches are the same lists in the same order on all topologies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.stream import StreamingDataLoader, StreamingDataset

BATCH = 24


def read_globally(folder: str, world_size: int, workers: int, **options: Any) -> list[list[int]]:
    """Return the global batches of an epoch, joined from all ranks in order."""
    batches: list[list[int]] = []
    lengths = []
    for rank in range(world_size):
        dataset = StreamingDataset(
            local=folder, global_batch_size=BATCH, rank=rank, world_size=world_size, **options
        )
        loader = StreamingDataLoader(dataset, num_workers=workers)
        number = -1
        for number, batch in enumerate(loader):
            local, total = loader.batch_share()
            assert len(batch["id"]) == len(batch["text"]) == max(local, 1)
            if rank == 0:
                batches.append([])
                assert total == len(dataset.sample_ids(number))
            batches[number] += batch["id"][:local].tolist()
        lengths.append(number + 1)
        assert len(loader) == number + 1
    assert len(set(lengths)) == 1, f"steps by rank: {lengths}"
    return batches


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False, "num_canonical_nodes": 4}])
def test_global_batches_are_equal_on_any_number_of_ranks_and_workers(
    write: Callable[..., str], options: dict[str, Any]
) -> None:
    # The last batch has 7 samples, so one of 8 ranks has none of it.
    folder = write(103)
    options = options | {"shuffle_block_size": 16}
    reference = StreamingDataset(local=folder, global_batch_size=BATCH, rank=0, world_size=1, **options)
    expected = [reference.sample_ids(number) for number in range(reference.num_batches)]
    assert [len(batch) for batch in expected] == [24, 24, 24, 24, 7]
    for world_size in (1, 2, 4, 8):
        for workers in (0, 1, 2) if world_size < 8 else (0, 2):
            assert read_globally(folder, world_size, workers, **options) == expected, (world_size, workers)


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 127, 10007])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once(write: Callable[..., str], count: int, shuffle: bool) -> None:
    folder = write(count, size_limit=40_000)
    dataset = StreamingDataset(local=folder, global_batch_size=BATCH, shuffle=shuffle)
    seen = [int(number) for batch in dataset.batches() for number in batch["id"]]
    assert sorted(seen) == list(range(count))
    assert (seen == list(range(count))) == (not shuffle or count == 1)


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("count", [48, 53, 103])
@pytest.mark.parametrize("world_size", [2, 4])
def test_with_any_tail_all_ranks_make_the_same_number_of_steps(
    write: Callable[..., str], tail: str, count: int, world_size: int
) -> None:
    folder = write(count)
    for workers in (0, 2):
        batches = read_globally(folder, world_size, workers, shuffle=True, tail=tail)
        steps = count // BATCH if tail == "drop" else -(-count // BATCH)
        assert [len(batch) for batch in batches] == [BATCH] * steps, workers


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 4 worker processes"
)  # on a machine with fewer CPUs
@pytest.mark.parametrize(("world_size", "workers"), [(1, 4), (8, 1), (8, 4)])
def test_the_order_of_many_ranks_and_workers(
    write: Callable[..., str], world_size: int, workers: int
) -> None:
    options = {"shuffle": True, "shuffle_block_size": 16}
    folder = write(103)
    reference = StreamingDataset(local=folder, global_batch_size=BATCH, rank=0, world_size=1, **options)
    expected = [reference.sample_ids(number) for number in range(reference.num_batches)]
    assert read_globally(folder, world_size, workers, **options) == expected


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 127])
def test_a_padded_epoch_logs_its_repeated_samples(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture, count: int
) -> None:
    caplog.set_level("INFO", logger="hocket.stream")
    batches = read_globally(write(count), min(2, count), 0, shuffle=True, tail="pad")
    seen = [number for batch in batches for number in batch]
    assert set(seen) == set(range(count))
    repeated = -count % BATCH
    assert len(seen) - count == repeated
    told = [record.message for record in caplog.records if "tail='pad'" in record.message]
    assert [message.split(" ", 1)[0] for message in told] == [str(repeated)] * (repeated > 0)


def test_epochs_are_in_storage_order_unless_shuffled_and_then_differ(
    write: Callable[..., str],
) -> None:
    folder = write(100)
    plain = StreamingDataset(local=folder, batch_size=10)
    shuffled = StreamingDataset(local=folder, batch_size=10, shuffle=True)
    again = StreamingDataset(local=folder, batch_size=10, shuffle=True)
    orders = []
    for _ in range(3):
        assert [s["id"] for s in plain] == list(range(100))
        orders.append([s["id"] for s in shuffled])
        assert [s["id"] for s in again] == orders[-1]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("tail", "lengths"), [("short", [8, 8, 4]), ("drop", [8, 8]), ("pad", [8, 8, 8])])
def test_tails_are_applied_and_logged_once(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture, tail: str, lengths: list[int]
) -> None:
    dataset = StreamingDataset(local=write(20), batch_size=8, shuffle=True, tail=tail)
    caplog.set_level("INFO", logger="hocket.stream")
    first = [batch["id"].tolist() for batch in dataset.batches()]
    list(dataset.batches())
    assert [len(batch) for batch in first] == lengths
    assert len(dataset) == sum(lengths)
    assert [record.message for record in caplog.records if f"tail='{tail}'" in record.message] == [
        {
            "short": "the last batch of each epoch has 4 samples instead of 8 (`tail='short'`)",
            "drop": "4 of 20 samples are left out in each epoch (`tail='drop'`)",
            "pad": "4 samples of each epoch are repeated (`tail='pad'`)",
        }[tail]
    ]
    if tail == "pad":
        assert first[2][4:] == first[0][:4]


@pytest.mark.parametrize("replication", [2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_replicated_ranks_read_the_same_batches(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, replication: int, workers: int
) -> None:
    folder = write(53)

    def read(**options: Any) -> list[list[int]]:
        dataset = StreamingDataset(local=folder, global_batch_size=12, shuffle=True, **options)
        return [batch["id"].tolist() for batch in StreamingDataLoader(dataset, num_workers=workers)]

    for rank in range(8) if workers == 0 else (1, 6):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
        groups = 8 // replication
        assert read(replication=replication) == read(rank=rank // replication, world_size=groups)


PLAN = """
import json, resource, sys, time
from hocket.stream import StreamingDataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dataset = StreamingDataset(local=sys.argv[1], global_batch_size=1024, shuffle=True)
last = dataset.num_batches * 99 // 100
ids = dataset.sample_ids(last, epoch=3)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([dataset.size, len(set(ids)), (peak - before) // 1024]))
"""


def test_a_plan_of_a_hundred_million_samples_takes_less_than_a_byte_each(tmp_path: Path) -> None:
    shard = {
        "column_encodings": ["int"], "column_names": ["x"], "column_sizes": [8], "compression": None,
        "format": "mds", "hashes": [], "samples": 16384, "size_limit": 1, "version": 2, "zip_data": None,
    }  # fmt: skip
    shards = [
        shard | {"raw_data": {"basename": f"shard.{number:05d}.mds", "bytes": 200_000, "hashes": {}}}
        for number in range(6104)
    ]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    size, distinct, mebibytes = json.loads(done.stdout)
    assert size == 6104 * 16384
    assert distinct == 1024
    # One byte a sample would be 95 MiB.
    assert mebibytes < 40
