"""Reading has bounded memory and requests, which do not grow over time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.native import Store
from hocket.stream import MDSWriter, StreamingDataset
from support.sampling import cases

SHARD = 1 << 20

EPOCHS = """
import gc, json, sys
from pathlib import Path
from hocket.stream import StreamingDataset

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

dataset = StreamingDataset(local=sys.argv[1], batch_size=16, shuffle=True, shuffle_block_size=64)
sizes = []
for epoch in range(int(sys.argv[2])):
    assert sum(len(batch["id"]) for batch in dataset.batches()) == dataset.epoch_size
    sizes.append(resident())
print(json.dumps(sizes))
"""

INDEX = """
import json, sys
from pathlib import Path
from hocket.stream import StreamingDataset

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
dataset = StreamingDataset(local=sys.argv[1], batch_size=64, shuffle=True)
assert len(set(dataset.sample_ids(10_000, epoch=2))) == 64
print(json.dumps([dataset.size, resident(), resident() - before]))
"""


def run(script: str, *args: object) -> Any:
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_later_epochs_take_no_more_memory_than_the_first_ones(write: Callable[..., str]) -> None:
    epochs = cases(full=400, sample=100)
    sizes = run(EPOCHS, write(400, size_limit=4000, compression="zstd"), epochs)
    assert max(sizes[epochs // 2 :]) < 1.05 * max(sizes[: epochs // 4])


@pytest.mark.slow
def test_an_index_of_many_shards_takes_little_memory(tmp_path: Path) -> None:
    shards = cases(full=1_300_000, sample=130_000)
    shard = {
        "column_encodings": ["int"], "column_names": ["x"], "column_sizes": [8], "compression": None,
        "format": "mds", "hashes": ["xxh3_64"], "samples": 1000, "size_limit": 1 << 26, "version": 2,
        "zip_data": None,
    }  # fmt: skip
    common = json.dumps(shard)[:-1]
    with (tmp_path / "index.json").open("w") as index:
        index.write('{"version": 2, "shards": [')
        for number in range(shards):
            hashes = f'"hashes": {{"xxh3_64": "{number:016x}"}}'
            file = f'"basename": "shard.{number:07d}.mds", "bytes": 12008, {hashes}'
            index.write(f'{"," if number else ""}{common}, "raw_data": {{{file}}}}}')
        index.write("]}")
    size, whole, taken = run(INDEX, tmp_path)
    assert size == 1000 * shards
    assert whole < 200e6
    assert taken < 120 * shards + 20e6


def test_prefetched_shards_stay_within_the_budget(
    s3d_faults: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    columns = {"id": "int", "x": "bytes"}
    with MDSWriter(columns=columns, out=server.uri("data"), size_limit=SHARD) as writer:
        for number in range(30):
            writer.write({"id": number, "x": bytes(SHARD - 300)})
    server.reset()
    dataset = StreamingDataset(
        remote=server.uri("data"),
        local=tmp_path / "cache",
        batch_size=1,
        prefetch_bytes=3 * SHARD,
        prefetch_batches=2,
    )
    seen = []
    for batch in dataset.batches():
        seen += batch["id"].tolist()
        deadline = time.monotonic() + 60
        fetched = -1
        while fetched != server.stats()["requests"]["GetObject"] and time.monotonic() < deadline:
            fetched = server.stats()["requests"]["GetObject"]
            time.sleep(0.02)
        # The index, the shards of this batch, of two waiting batches and of one being made, and the budget.
        assert fetched <= 1 + len(seen) + 2 + 1 + 3
    assert seen == list(range(30))
    assert server.stats()["requests"]["GetObject"] == 1 + 30


def test_a_large_shard_takes_one_request_per_part(
    s3d: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    part = 8 << 20
    remote = s3d.uri(tmp_path.name)
    with MDSWriter(columns={"x": "bytes"}, out=remote, size_limit=2 * part, hashes=["xxh3_64"]) as writer:
        for _ in range(20):
            writer.write({"x": bytes(part // 5)})
    sizes = [shard["raw_data"]["bytes"] for shard in json.loads(Store(remote).get("index.json"))["shards"]]
    s3d.reset()
    dataset = StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=4)
    assert sum(len(batch["x"]) for batch in dataset.batches()) == 20
    assert s3d.stats()["requests"]["GetObject"] == 1 + sum(-(-size // part) for size in sizes)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_next_epochs_first_shards_are_fetched_during_the_last_batches(
    s3d: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on: bool
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    remote, budget = s3d.uri(tmp_path.name), 4
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=remote, size_limit=1 << 14) as writer:
        for number in range(64):
            writer.write({"id": number, "x": bytes((1 << 14) - 300)})
    # Each canonical node reads half of the shards, and other ones in the next epoch.
    dataset = StreamingDataset(
        remote=remote,
        local=tmp_path / "cache",
        global_batch_size=2,
        rank=0,
        world_size=2,
        shuffle=True,
        prefetch_bytes=budget << 14,
        prefetch_next_epoch=is_on,
    )
    batches = dataset.batches()
    own = {int(next(batches)["id"][0]) for _ in range(dataset.num_batches)}
    assert len(own) == 32
    following = [dataset.sample_ids(number, epoch=1)[0] for number in range(dataset.num_batches)]
    first = next(number for number in following if number not in own)
    wanted = tmp_path / "cache" / f"shard.{first:05}.mds"
    deadline = time.monotonic() + (120 if is_on else 0.3)
    while not wanted.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert wanted.exists() == is_on
    came = {int(path.stem.split(".")[1]) for path in (tmp_path / "cache").glob("shard.*")} - own
    assert len(came) <= budget
    assert came <= set(following)
    assert list(batches) == []
    assert [int(batch["id"][0]) for batch in dataset.batches()] == following
