"""`cache_limit` is never exceeded, causes no deadlock and never removes the only copy, even after kills."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hocket.native import Store
from hocket.stream import JSONWriter, MDSWriter, Stream, StreamingDataset
from hocket.stream.errors import ConfigError, ShardCorruptError
from support.stored import write_noise

SHARD = 64 << 10
COUNT = 96
"""Number of samples: eight of about 8 KiB in each of twelve shards."""

READ = """
import sys
from hocket.stream import StreamingDataset
remote, local, limit, seed = sys.argv[1:]
dataset = StreamingDataset(remote=remote, local=local, batch_size=4, shuffle=True, shuffle_block_size=24,
                           shuffle_seed=int(seed), cache_limit=int(limit))
for epoch in range(2):
    ids = sorted(int(number) for batch in dataset.batches() for number in batch["id"])
    assert ids == list(range(96)), ids
print("read")
"""

HOLD = """
import sys, time
from hocket.stream import StreamingDataset
remote, local, limit = sys.argv[1:]
dataset = StreamingDataset(remote=remote, local=local, batch_size=2, prefetch_batches=1,
                           cache_limit=int(limit))
batches = dataset.batches()
next(batches)
assert "/dev/shm" not in open("/proc/self/maps").read()
print("holding", flush=True)
time.sleep(300)
"""

SPREAD = """
import resource, sys
from pathlib import Path
from hocket.stream import StreamingDataset
remote, local, limit = sys.argv[1:]
dataset = StreamingDataset(remote=remote, local=local, batch_size=600, shuffle=True, shuffle_block_size=10**6,
                           cache_limit=int(limit), prefetch_batches=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (480, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) >> 10
before, ids = status("VmRSS"), []
for batch, _ in zip(dataset.batches(), range(2)):
    assert [row[:1] for row in batch["x"]] == [b"x" if isinstance(row, bytes) else "x" for row in batch["x"]]
    ids += batch["id"].tolist()
print(len(ids) == len(set(ids)), len(ids), status("VmHWM") - before)
"""

LOOK_UP = """
numbers = list(range(0, 600, 2))
assert [sample["id"] for sample in dataset[numbers]] == numbers
assert [sample["id"] for sample in dataset[:]] == list(range(600))
"""


@pytest.fixture
def remote(s3d: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Write twelve raw shards under a prefix of this test."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return write(s3d.uri(tmp_path.name))


def write(out: str, **options: Any) -> str:
    return write_noise(out, COUNT, **{"size_limit": SHARD} | options)


def read_ids(**options: Any) -> list[int]:
    return [sample["id"] for sample in StreamingDataset(batch_size=4, **options)]


def batch_ids(dataset: StreamingDataset) -> list[int]:
    return [int(number) for batch in dataset.batches() for number in batch["id"]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def disk_usage(folder: Path) -> int:
    """Return the bytes on disk, read while holding the folder's lock so that no reader changes them."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        return sum(map(blocks, folder.iterdir()))
    finally:
        os.close(opened)


def blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # a download that was abandoned
        return 0


@contextmanager
def running(script: str, *args: object, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process, and kill it at the end of the `with` block."""
    command = [sys.executable, "-c", script, *map(str, args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0.5, 1.5, 2, 5])
def test_processes_that_share_a_cache_stay_under_its_limit(
    remote: str, tmp_path: Path, shards: float
) -> None:
    cache, temporary, limit = tmp_path / "cache", tmp_path / "tmp", int(shards * SHARD)
    temporary.mkdir()
    cache.mkdir()
    most = 0
    with (
        running(READ, remote, cache, limit, 1, TMPDIR=str(temporary)) as one,
        running(READ, remote, cache, limit, 2, TMPDIR=str(temporary)) as two,
        running(READ, remote, cache, limit, 3, TMPDIR=str(temporary)) as three,
    ):
        deadline = time.monotonic() + 250
        while any(process.poll() is None for process in (one, two, three)):
            most = max(most, disk_usage(cache))
            assert time.monotonic() < deadline, "the readers did not finish"
            time.sleep(0.001)
        for process in (one, two, three):
            assert process.communicate(timeout=60)[0] == "read\n"
    assert most <= limit
    if shards > 1.5:
        assert most > SHARD
    assert not any(name.endswith(".part") for name in names(cache))
    assert names(temporary) == []


@contextmanager
def holding(remote: str, cache: Path, limit: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that keeps the first shards open."""
    with running(HOLD, remote, cache, limit) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        yield holder


def test_a_shard_in_use_stays_until_its_process_dies(remote: str, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", int(1.5 * SHARD)
    first = cache / "shard.00000.mds"
    with holding(remote, cache, limit) as holder:
        dataset = StreamingDataset(remote=remote, local=cache, batch_size=4, cache_limit=limit)
        assert batch_ids(dataset) == list(range(COUNT))
        counts = dataset.metrics()
        assert (counts["stream/passed"], counts["stream/evicted"]) == (11, 0)
        assert names(cache) == ["index.json", first.name]
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
    assert batch_ids(dataset) == list(range(COUNT))
    assert dataset.metrics()["stream/evicted"] > 0
    assert not first.exists()
    assert disk_usage(cache) <= limit


def test_a_stopped_process_that_holds_the_folders_lock_does_not_block_others(
    remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    options: dict[str, Any] = {"remote": remote, "local": cache, "cache_limit": 3 * SHARD}
    dataset = StreamingDataset(batch_size=4, download_timeout=3, **options)
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert batch_ids(dataset) == list(range(COUNT))
        assert names(cache) == ["index.json"]
    finally:
        os.close(folder)
    assert dataset.metrics()["stream/passed"] >= 12
    assert "look for a stopped process" in caplog.text
    assert read_ids(**options) == list(range(COUNT))
    assert len(names(cache)) > 1


def test_files_of_a_killed_download_do_not_count(
    s3d_faults: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    remote, cache, limit = write(server.uri("slow")), tmp_path / "cache", int(1.5 * SHARD)
    # So slow that the process is killed long before it has a whole shard.
    server.set_faults(f"kind=bandwidth,bytes_per_s={SHARD // 60},op=GetObject,key=*shard*")
    with running(HOLD, remote, cache, limit) as reader:
        deadline = time.monotonic() + 120
        while not list(cache.glob(".shard.*.part")):
            assert time.monotonic() < deadline
            assert reader.poll() is None
            time.sleep(0.01)
        reader.send_signal(signal.SIGKILL)
        reader.wait(timeout=60)
    (left,) = cache.glob(".shard.*.part")
    server.set_faults()
    assert names(cache) == [left.name, "index.json"]
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=4, cache_limit=limit)
    # Reading the last shard must remove the partial file of the first one, which no process downloads now.
    assert dataset[COUNT - 1]["id"] == COUNT - 1
    assert names(cache) == ["index.json", "shard.00011.mds"]


def test_the_least_recently_used_shard_is_evicted_first(remote: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=4, cache_limit=int(3.5 * SHARD))
    for number in [0, 8, 16, 0, 24]:
        assert dataset[number]["id"] == number
    assert names(cache) == ["index.json", *(f"shard.{number:05}.mds" for number in [0, 2, 3])]
    counts = dataset.metrics()
    assert (counts["stream/cache_hits"], counts["stream/fetches"], counts["stream/evicted"]) == (1, 4, 1)
    sizes = [shard["raw_data"]["bytes"] for shard in json.loads((cache / "index.json").read_text())["shards"]]
    assert counts["stream/fetched_bytes"] == sum(sizes[:4])
    assert (counts["stream/batches"], counts["stream/passed"]) == (5, 0)
    assert 0 < counts["stream/wait_s"] < 60


def test_data_without_a_remote_is_never_removed(remote: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(str(own))
    (tmp_path / "link").symlink_to(own)
    before = names(own)
    assert read_ids(local=own, cache_limit=SHARD) == list(range(COUNT))
    assert read_ids(remote=own, local=tmp_path / "link", cache_limit=SHARD) == list(range(COUNT))
    both = [Stream(local=own), Stream(remote=remote, local=tmp_path / "cache")]
    assert len(read_ids(streams=both, cache_limit=2 * SHARD)) == 2 * COUNT
    assert names(own) == before
    assert len(names(tmp_path / "cache")) < 4


@pytest.mark.parametrize("keep_zip", [False, True])
def test_the_limit_holds_for_compressed_shards(s3d: Any, remote: str, tmp_path: Path, keep_zip: bool) -> None:
    cache, limit = tmp_path / "cache", int(2.5 * SHARD)
    zipped = write(s3d.uri(f"{tmp_path.name}-zip"), compression="zstd")
    options: dict[str, Any] = {"remote": zipped, "local": cache, "cache_limit": limit, "keep_zip": keep_zip}
    # Prefetching the next epoch could cache its first shard, and might evict the compressed file.
    options["prefetch_next_epoch"] = False
    for _ in range(2):
        assert read_ids(**options) == list(range(COUNT))
        assert disk_usage(cache) <= limit
    assert StreamingDataset(batch_size=4, **options)[0]["id"] == 0
    assert "shard.00000.mds" in names(cache)
    assert ("shard.00000.mds.zstd" in names(cache)) == keep_zip


@pytest.mark.parametrize("shards", [0.5, 2.5])
def test_corrupt_shards_are_found_under_a_limit(remote: str, tmp_path: Path, shards: float) -> None:
    cache, limit = tmp_path / "cache", int(shards * SHARD)
    assert read_ids(remote=remote, local=cache, cache_limit=limit) == list(range(COUNT))
    for path in cache.glob("*.mds"):
        flip(Store(str(cache)), path.name)
    assert read_ids(remote=remote, local=cache, cache_limit=limit) == list(range(COUNT))
    flip(Store(remote), "shard.00004.mds")
    with pytest.raises(ShardCorruptError, match=r"xxh3_64 \w+, expected xxh3_64 \w+"):
        read_ids(remote=remote, local=cache, cache_limit=limit)
    assert "shard.00004.mds" not in names(cache)


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize(
    ("limit", "message"), [(0, "from 1"), ("100 parsecs", "64mb"), (1000, "index files alone take")]
)
def test_a_limit_that_cannot_be_kept_is_refused(
    remote: str, tmp_path: Path, limit: int | str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=4, cache_limit=limit)


@pytest.mark.parametrize("writer", [MDSWriter, JSONWriter])
def test_a_batch_may_span_more_shards_than_the_limit_of_open_files(
    tmp_path: Path, writer: type[MDSWriter | JSONWriter]
) -> None:
    with writer(columns={"id": "int", "x": "str"}, out=str(tmp_path / "all"), size_limit=150) as out:
        for number in range(600):
            out.write({"id": number, "x": "x" * 80})
    assert len(names(tmp_path / "all")) > 500
    with running(SPREAD + LOOK_UP, tmp_path / "all", tmp_path / "cache", 1 << 30) as process:
        said, error = process.communicate(timeout=200)
    assert said.split()[:2] == ["True", "600"], error
    assert process.returncode == 0, error


def test_shards_that_the_cache_has_no_room_for_take_little_memory(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=str(tmp_path / "all"), size_limit=1 << 20) as out:
        for number in range(120_000):
            out.write({"id": number, "x": b"x" * 1000})
    assert len(names(tmp_path / "all")) > 100
    with running(SPREAD, tmp_path / "all", tmp_path / "cache", 8 << 20) as process:
        said, error = process.communicate(timeout=200)
    assert said.split()[:2] == ["True", "1200"], error
    # 8 MiB of shards for the batch, 8 MiB of prefetched ones, and the samples; each batch needs all shards.
    assert int(said.split()[2]) < 50
