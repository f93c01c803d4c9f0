"""Faults of disks, objects and responses during a run: they raise typed errors and yield no wrong data."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.native import Store, counters
from hocket.native.errors import StoreChangedError, StoreTransientError
from hocket.stream import StreamingDataset
from hocket.stream.errors import ShardCorruptError, StreamIOError
from support.s3d import Server
from support.stored import write_noise

COUNT = 64
SHARD = 64 << 10


def write(out: str, **options: Any) -> str:
    """Write eight samples per shard, with the same sizes for any `first`."""
    return write_noise(out, COUNT, **{"size_limit": SHARD} | options)


def read_ids(**options: Any) -> list[int]:
    return [int(k) for batch in StreamingDataset(batch_size=8, **options).batches() for k in batch["id"]]


@pytest.fixture
def server(s3d_faults: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Server:
    """Start a server with a data set under `data`."""
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    write(server.uri("data"))
    return server


@pytest.mark.parametrize("hashes", [None, ["sha1"]])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], r"has \d+ bytes, expected \d+ bytes"),
        (lambda data: b"", r"has 0 bytes, expected \d+ bytes"),
        (lambda data: data + b"x", r"has \d+ bytes, expected \d+ bytes"),
        (lambda data: b"\xff" * len(data), r"expected sha1|expected 5 samples"),
    ],
    ids=["truncated", "empty", "longer", "overwritten"],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_damaged_shard_yields_no_sample(
    write: Callable[..., str],
    tmp_path: Path,
    spoil: Callable[[bytes], bytes],
    message: str,
    hashes: list[str] | None,
    is_remote: bool,
) -> None:
    path = Path(write(5, hashes=hashes), "shard.00000.mds")
    path.write_bytes(spoil(path.read_bytes()))
    options: dict[str, Any] = {"local": path.parent}
    if is_remote:
        options = {"remote": path.parent, "local": tmp_path / "cache"}
    batches = StreamingDataset(batch_size=1, **options).batches()
    with pytest.raises(ShardCorruptError, match=message) as caught:
        next(batches)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "cache" / path.name).exists()


@pytest.mark.parametrize("first", [0, 1000])
def test_shards_replaced_during_an_epoch_raise_and_are_not_mixed_in(
    server: Server, tmp_path: Path, first: int
) -> None:
    remote, cache = server.uri("data"), tmp_path / "cache"
    other = Store(write(server.uri("other"), first=first))
    others = {meta.key: other.get(meta.key) for meta in other.list()}
    # Little is prefetched, so the last shards have not been requested when they are replaced.
    dataset = StreamingDataset(
        remote=remote, local=cache, batch_size=8, prefetch_bytes=1, prefetch_batches=1, fetch_threads=1
    )
    batches = dataset.batches()
    seen = next(batches)["id"].tolist()
    for name, content in others.items():
        Store(remote).put(name, content)
    with pytest.raises(ShardCorruptError, match=r"xxh3_64 \w+, expected xxh3_64 \w+"):
        seen.extend(number for batch in batches for number in batch["id"].tolist())
    assert seen == list(range(len(seen)))
    assert 8 <= len(seen) < COUNT
    assert read_ids(remote=remote, local=cache) == list(range(first, first + COUNT))


@pytest.mark.parametrize("limit", [3 * SHARD, 8 << 10], ids=["evicted", "held in memory"])
def test_without_digests_a_shard_fetched_again_must_be_the_first_version(
    server: Server, tmp_path: Path, limit: int
) -> None:
    remote = write(server.uri("bare"), hashes=None)
    options: dict[str, Any] = {"remote": remote, "local": tmp_path / "cache", "cache_limit": limit}
    dataset = StreamingDataset(batch_size=8, prefetch_next_epoch=False, **options)
    assert [int(k) for batch in dataset.batches() for k in batch["id"]] == list(range(COUNT))
    Store(remote).put("shard.00000.mds", Store(remote).get("shard.00000.mds"))
    assert [int(k) for batch in dataset.batches() for k in batch["id"]] == list(range(COUNT))
    other = write(server.uri("other"), first=1000, hashes=None)
    Store(remote).put("shard.00000.mds", Store(other).get("shard.00000.mds"))
    with pytest.raises(StoreChangedError, match=rf"{remote}/shard\.00000\.mds.*expected ETag"):
        next(dataset.batches())
    assert read_ids(**options)[0] == 1000


def test_a_store_that_always_fails_raises_with_the_key_at_the_deadline(
    server: Server, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"remote": server.uri("data"), "local": tmp_path / "cache"}
    dataset = StreamingDataset(batch_size=8, download_timeout=3, **options)
    server.set_faults("kind=500")
    with pytest.raises(StoreTransientError, match=rf"{server.uri('data')}/shard\.0000\d\.mds"):
        next(dataset.batches())
    server.set_faults()
    assert [int(k) for batch in dataset.batches() for k in batch["id"]] == list(range(COUNT))


def test_one_faulty_response_in_twenty_is_retried_and_counted(server: Server, tmp_path: Path) -> None:
    retries = 0

    def read(cache: Path) -> list[tuple[int, bytes]]:
        nonlocal retries
        dataset = StreamingDataset(batch_size=8, remote=server.uri("data"), local=cache)
        samples = [(sample["id"], sample["x"]) for sample in dataset]
        metrics = dataset.metrics()
        retries += int(metrics["stream/retries"])
        assert metrics["stream/requests"] - metrics["stream/retries"] == metrics["stream/fetches"]
        return samples

    expected = read(tmp_path / "sound")
    assert [number for number, _ in expected] == list(range(COUNT))
    kinds = ("slowdown", "reset", "500", "short_body")
    server.set_faults(*(f"kind={kind},rate=0.05,op=GetObject" for kind in kinds), seed=5)
    before = counters()["retries"]
    for number in range(4):
        assert read(tmp_path / str(number)) == expected
    all_retries = counters()["retries"] - before
    assert all_retries == sum(server.stats()["faults"].values())
    # `stream/retries` counts shards only; the process's counter has the index's retries, too.
    assert 0 < retries <= all_retries


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk with room for about three shards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={int(3.5 * SHARD)}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=30, check=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_full_disk_raises_and_a_smaller_cache_limit_avoids_it(
    server: Server, small_disk: Path, compression: str | None
) -> None:
    remote = write(server.uri("zip"), compression=compression)
    with pytest.raises(StreamIOError, match=r"shard\.0000\d\.mds.*[Nn]o space left"):
        read_ids(remote=remote, local=small_disk)
    assert not [path for path in small_disk.iterdir() if path.name.startswith(".")]
    assert read_ids(remote=remote, local=small_disk, cache_limit=3 * SHARD) == list(range(COUNT))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_read_only_cache_is_read_and_writing_to_one_raises(
    server: Server, tmp_path_factory: pytest.TempPathFactory, is_copied: bool, is_packed: bool
) -> None:
    remote = write(server.uri("zip"), compression="zstd") if is_packed else server.uri("data")
    cache = tmp_path_factory.mktemp("cache")
    assert read_ids(remote=remote, local=cache, keep_zip=is_packed) == list(range(COUNT))
    if is_packed:
        for path in cache.glob("*.mds"):
            path.unlink()
    if is_copied:  # by a program that leaves out extended attributes
        for path in cache.iterdir():
            shutil.copyfile(path, path.with_suffix(".copy"))
            path.with_suffix(".copy").replace(path)
    bare = cache / "bare"
    bare.mkdir()
    shutil.copyfile(cache / "index.json", bare / "index.json")
    mount = ["mount", "-o", "bind,ro", str(cache), str(cache)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        requested = counters()["requests"]
        assert read_ids(remote=remote, local=cache) == list(range(COUNT))
        assert counters()["requests"] - requested <= 2  # for the index
        assert read_ids(local=cache) == list(range(COUNT))
        with pytest.raises(
            StreamIOError, match=r"below`.*Read-only.*pass a writable folder with free space as `local`"
        ):
            read_ids(remote=write(server.uri("other")), local=cache / "below")
        if is_packed:
            with pytest.raises(StreamIOError, match=r"shard\.00000.*Read-only.*pass a writable folder"):
                read_ids(remote=remote, local=bare)
    finally:
        subprocess.run(["umount", str(cache)], timeout=30, check=True)
