"""Random access by number: the same samples as in iteration, fetching only their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.native.errors import StoreChangedError
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.errors import ShardCorruptError, ShardNotFoundError
from support.s3d import Server

PER_SHARD = 500
COUNT = 3 * PER_SHARD
SAMPLE = 4096


def write(out: str, *, first: int = 0, **options: Any) -> str:
    columns = {"id": "int", "text": "str", "tokens": f"ndarray:uint8:{SAMPLE}"}
    with MDSWriter(columns=columns, out=out, **{"size_limit": PER_SHARD * 4140} | options) as writer:
        for number in range(first, first + COUNT):
            tokens = np.full(SAMPLE, number % 251, np.uint8)
            writer.write({"id": number, "text": f"{number:>010}", "tokens": tokens})
    return out


@pytest.fixture(scope="module")
def data(s3d: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3d.env.items():
            patch.setenv(name, value)
        return write(s3d.uri("lookup"), hashes=["xxh3_64"])


@pytest.fixture
def remote(s3d: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write three raw shards of 2 MB, and reset the count of requests."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    s3d.reset()
    return data


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check(samples: list[dict[str, Any]], numbers: list[int]) -> None:
    assert [sample["id"] for sample in samples] == numbers
    assert [sample["text"] for sample in samples] == [f"{number:>010}" for number in numbers]
    for sample, number in zip(samples, numbers, strict=True):
        assert sample["tokens"].shape == (SAMPLE,)
        assert np.unique(sample["tokens"]).tolist() == [number % 251]


@pytest.mark.parametrize("where", ["remote", "cache", "memory"])
def test_integers_slices_and_lists_give_the_samples_of_iteration(
    remote: str, tmp_path: Path, where: str
) -> None:
    cache = tmp_path / "cache"
    limit = 1 << 20 if where == "memory" else None
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=100, cache_limit=limit)
    if where == "cache":
        check(list(dataset), list(range(COUNT)))
    check([dataset[0], dataset[-1], dataset[np.int64(7)]], [0, COUNT - 1, 7])
    check(dataset[[1400, 3, 3, 700, -COUNT]], [1400, 3, 3, 700, 0])
    check(dataset[np.array([5, 4])], [5, 4])
    check(dataset[495:510], list(range(495, 510)))
    check(dataset[1499:0:-300], list(range(1499, 0, -300)))
    check(dataset[0:0], [])
    check(dataset[100:1000], list(range(100, 1000)))
    with pytest.raises(IndexError, match="sample 1500"):
        dataset[COUNT]


def test_a_few_samples_of_a_large_shard_fetch_only_their_bytes(s3d: Any, remote: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=1)
    at_first = s3d.stats()
    check(dataset[[250, 251, 260]], [250, 251, 260])
    asked = s3d.stats()["requests"]["GetObject"] - at_first["requests"]["GetObject"]
    assert asked == 2, "one request of their offsets, one of all samples"
    assert dataset.metrics()["stream/fetched_bytes"] < 20 * SAMPLE
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["index.json"]
    # Two shards, each with one request of offsets and one of neighbouring samples.
    check(dataset[[600, 601, 1100, 1101, 1102]], [600, 601, 1100, 1101, 1102])
    assert s3d.stats()["requests"]["GetObject"] - at_first["requests"]["GetObject"] == 2 + 4


def test_a_shard_that_is_requested_often_is_fetched_whole(s3d: Any, remote: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=1)
    for number in range(0, 200, 10):
        check([dataset[number]], [number])
    assert sorted(path.name for path in cache.iterdir()) == ["index.json", "shard.00000.mds"]
    # The index; offsets and sample, eight times; the shard.
    assert s3d.stats()["requests"]["GetObject"] == 1 + 2 * 8 + 1
    check(dataset[500:700], list(range(500, 700)))
    assert "shard.00001.mds" in {path.name for path in cache.iterdir()}
    assert s3d.stats()["requests"]["GetObject"] == 1 + 2 * 8 + 1 + 1


def test_compressed_shards_are_fetched_whole(s3d: Any, remote: str, tmp_path: Path) -> None:
    zipped = write(s3d.uri("lookup-zip"), compression="zstd")
    dataset = StreamingDataset(remote=zipped, local=tmp_path / "cache", batch_size=1)
    check(dataset[[1, 1499]], [1, 1499])
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {"index.json", "shard.00000.mds", "shard.00002.mds"}


def replace(remote: str, tmp_path: Path, *, extra: bytes = b"", **options: Any) -> None:
    """Replace the first two shards by shards of the same layout, with ids that are 100,000 higher."""
    other = tmp_path / "other"
    write(str(other), first=100_000, **options)
    for name in ("shard.00000.mds", "shard.00001.mds"):
        Store(remote).put(name, (other / name).read_bytes() + extra)


@pytest.mark.parametrize("is_listing", [False, True], ids=["ranges", "then whole"])
@pytest.mark.parametrize("hashes", [None, ["xxh3_64"]])
def test_samples_of_two_versions_of_a_shard_raise(
    s3d: Any, remote: str, tmp_path: Path, hashes: list[str] | None, is_listing: bool
) -> None:
    mine = write(s3d.uri(tmp_path.name), hashes=hashes)
    options: dict[str, Any] = {"remote": mine, "local": tmp_path / "cache", "batch_size": 1}
    dataset = StreamingDataset(**options)
    check([dataset[3]], [3])
    replace(mine, tmp_path, hashes=hashes)
    # A shard read by ranges is compared by its ETag; one fetched whole by its digest, if it has one.
    wrong = ShardCorruptError if is_listing and hashes else StoreChangedError
    with pytest.raises(wrong, match=rf"{mine}/shard\.00000\.mds"):
        dataset[0:300] if is_listing else dataset[3]
    check([dataset[1400]], [1400])
    assert dataset[600]["id"] == 100_600, "no sample of this shard was read before"
    assert StreamingDataset(**options)[3]["id"] == 100_003


def test_an_object_replaced_between_offsets_and_samples_raises(
    s3d_faults: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    remote = write(server.uri("data"))
    dataset = StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=1)
    # The request of offsets succeeds; that of samples is delayed until the object has been replaced.
    server.set_faults("kind=slowdown,op=GetObject,after=1")
    with ThreadPoolExecutor(1, thread_name_prefix="hocket-test") as pool:
        asked = pool.submit(dataset.__getitem__, 3)
        wait_until(lambda: server.stats()["faults"])
        replace(remote, tmp_path)
        server.set_faults()
        with pytest.raises(StoreChangedError, match=rf"{remote}/shard\.00000\.mds.*expected ETag"):
            asked.result(timeout=60)


def test_a_shard_of_another_size_than_in_the_index_is_corrupt(s3d: Any, remote: str, tmp_path: Path) -> None:
    mine = write(s3d.uri(tmp_path.name), hashes=None)
    replace(mine, tmp_path, extra=b"x")
    dataset = StreamingDataset(remote=mine, local=tmp_path / "cache", batch_size=1)
    with pytest.raises(ShardCorruptError, match=r"shard\.00000\.mds` has \d+ bytes, expected \d+ bytes"):
        dataset[3]


def test_indices_that_are_not_integers_raise(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path) as writer:
        for number in range(5):
            writer.write({"id": number})
    dataset = StreamingDataset(local=tmp_path, batch_size=1)
    mask = np.array([True, False, True, False, False])
    bad: list[Any] = [1.5, [0.7, 2.9], True, mask, [True, False], "1", None, [[1]], [[1], [1, 2]], [2.0]]
    for at in bad:
        with pytest.raises(TypeError, match="expected an integer, a slice"):
            dataset[at]
    assert dataset[[]] == dataset[np.empty(0, np.int32)] == dataset[()] == []
    assert dataset[np.uint8(3)]["id"] == dataset[np.array(3)][0]["id"] == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"\xff" * len(data),
        lambda data: data[:4] + (2**31).to_bytes(4, "little") * PER_SHARD + data[4 + 4 * PER_SHARD :],
        lambda data: data[:4] + data[12:16] + data[8:12] + data[12:],
        lambda data: data[:4] + bytes(8) + data[12:],
    ],
    ids=["garbage", "beyond the end", "backwards", "in the table"],
)
def test_invalid_offsets_raise_a_corrupt_shard(
    s3d: Any, remote: str, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    other = s3d.uri(f"{tmp_path.name}")
    for key in ("index.json", "shard.00000.mds"):
        content = Store(remote).get(key)
        Store(other).put(key, spoil(content) if key.endswith("mds") else content)
    dataset = StreamingDataset(remote=other, local=tmp_path / "cache", batch_size=1)
    with pytest.raises(ShardCorruptError, match=rf"{other}/shard\.00000\.mds.*sample [01] between"):
        dataset[[0, 1]]
    with pytest.raises(ShardNotFoundError, match=r"shard\.00001\.mds"):
        dataset[700]
