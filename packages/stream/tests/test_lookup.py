"""Samples by number: what an iteration gives, for the price of their own bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.errors import ShardCorruptError, ShardNotFoundError

PER_SHARD = 500
COUNT = 3 * PER_SHARD
SAMPLE = 4096


def write(out: str, **options: Any) -> str:
    columns = {"id": "int", "text": "str", "tokens": f"ndarray:uint8:{SAMPLE}"}
    with MDSWriter(columns=columns, out=out, **{"size_limit": PER_SHARD * 4140} | options) as writer:
        for number in range(COUNT):
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
    """Three raw shards of 2 MB; requests are counted from here on."""
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    s3d.reset()
    return data


def check(samples: list[dict[str, Any]], numbers: list[int]) -> None:
    assert [sample["id"] for sample in samples] == numbers
    assert [sample["text"] for sample in samples] == [f"{number:>010}" for number in numbers]
    for sample, number in zip(samples, numbers, strict=True):
        assert sample["tokens"].shape == (SAMPLE,)
        assert np.unique(sample["tokens"]).tolist() == [number % 251]


@pytest.mark.parametrize("where", ["remote", "cache", "memory"])
def test_any_way_of_asking_is_what_an_iteration_gives(remote: str, tmp_path: Path, where: str) -> None:
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


def test_a_few_samples_of_a_large_shard_cost_their_own_bytes(s3d: Any, remote: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=1)
    at_first = s3d.stats()
    check(dataset[[250, 251, 260]], [250, 251, 260])
    asked = s3d.stats()["requests"]["GetObject"] - at_first["requests"]["GetObject"]
    assert asked == 2, "their offsets, then all of them together"
    assert dataset.metrics()["stream/fetched_bytes"] < 20 * SAMPLE
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["index.json"]
    # Two shards, in each what is near travels together.
    check(dataset[[600, 601, 1100, 1101, 1102]], [600, 601, 1100, 1101, 1102])
    assert s3d.stats()["requests"]["GetObject"] - at_first["requests"]["GetObject"] == 2 + 4


def test_a_shard_that_is_asked_for_often_or_for_much_comes_whole(
    s3d: Any, remote: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    dataset = StreamingDataset(remote=remote, local=cache, batch_size=1)
    for number in range(0, 200, 10):
        check([dataset[number]], [number])
    assert sorted(path.name for path in cache.iterdir()) == ["index.json", "shard.00000.mds"]
    # The index; eight times two ranges; the shard.
    assert s3d.stats()["requests"]["GetObject"] == 1 + 2 * 8 + 1
    check(dataset[500:700], list(range(500, 700)))
    assert "shard.00001.mds" in {path.name for path in cache.iterdir()}
    assert s3d.stats()["requests"]["GetObject"] == 1 + 2 * 8 + 1 + 1


def test_compressed_shards_come_whole(s3d: Any, remote: str, tmp_path: Path) -> None:
    zipped = write(s3d.uri("lookup-zip"), compression="zstd")
    dataset = StreamingDataset(remote=zipped, local=tmp_path / "cache", batch_size=1)
    check(dataset[[1, 1499]], [1, 1499])
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {"index.json", "shard.00000.mds", "shard.00002.mds"}


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
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
def test_offsets_that_lie_are_a_corrupt_shard(
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
