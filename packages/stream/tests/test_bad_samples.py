"""Samples that cannot be decoded: they raise, or are replaced by the same samples on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.stream import JSONWriter, MDSWriter, Stream, StreamingDataset
from hocket.stream.errors import ConfigError, SampleCorruptError, ShardCorruptError

COUNT = 60
BAD = {7, 20, 21, 22, 59}
"""One bad sample alone, several in a row, and the last one."""


def stand_in(number: int) -> int:
    """Return the next good sample, cyclically."""
    return {7: 8, 20: 23, 21: 23, 22: 23, 59: 0}.get(number, number)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    columns = {"id": "int", "meta": "json"}
    with MDSWriter(columns=columns, out=tmp_path / "d", size_limit=400, hashes=None) as writer:
        for number in range(COUNT):
            writer.write({"id": number, "meta": {"k": number}})
    spoil(tmp_path / "d", BAD)
    return str(tmp_path / "d")


def spoil(folder: Path, numbers: set[int]) -> None:
    """Make the JSON of samples unreadable in the shards, since the writer writes none that is."""
    for shard in folder.glob("*.mds"):
        data = shard.read_bytes()
        for number in numbers:
            data = data.replace(b'{"k": %d}' % number, b'{"k": %d]' % number)
        shard.write_bytes(data)


def check(batch: dict[str, Any]) -> list[int]:
    ids = [int(number) for number in batch["id"]]
    assert [value["k"] for value in batch["meta"]] == ids
    return ids


@pytest.mark.parametrize("order", ["native", "mosaic"])
def test_replacements_are_the_same_on_any_topology(folder: str, order: str) -> None:
    options: dict[str, Any] = {
        "local": folder,
        "global_batch_size": 8,
        "shuffle": True,
        "order": order,
        "on_bad_sample": "replace",
        "num_canonical_nodes": 2,
    }
    # With `order="mosaic"` a global batch is the same set on any topology; with "native" the same list.
    arrange: Any = list if order == "native" else sorted
    whole = StreamingDataset(rank=0, world_size=1, **options)
    expected = {
        number: arrange(map(stand_in, whole.sample_ids(number, epoch=1)))
        for number in range(whole.num_batches)
    }
    for world_size in (1, 2, 4):
        batches: dict[int, list[int]] = {number: [] for number in expected}
        for rank in range(world_size):
            dataset = StreamingDataset(rank=rank, world_size=world_size, **options)
            for worker in range(2):
                for batch in dataset.read_batches(epoch=1, start=0, first=worker, stride=2):
                    batches[batch.number] += check(batch.columns)[: batch.local]
            assert dataset.metrics()["stream/replaced"] <= len(BAD) * 2
        assert {number: arrange(ids) for number, ids in batches.items()} == expected


def test_replacements_are_counted_logged_once_and_resumed(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = StreamingDataset(local=folder, batch_size=8, shuffle=True, on_bad_sample="replace")
    for _ in range(2):
        expected = [[*map(stand_in, dataset.sample_ids(k))] for k in range(dataset.num_batches)]
        batches = dataset.batches()
        seen = [check(next(batches)) for _ in range(3)]
        state = dataset.state_dict()
        dataset.load_state_dict(state)
        assert seen + [check(batch) for batch in dataset.batches()] == expected
        assert sum("stands in for sample" in record.message for record in caplog.records) == len(BAD)
    assert dataset.metrics()["stream/replaced"] == 2 * len(BAD)


def test_a_bad_sample_raises_by_default_and_always_in_random_access(folder: str) -> None:
    with pytest.raises(SampleCorruptError, match="column `meta`: a value of 8 bytes") as caught:
        list(StreamingDataset(local=folder, batch_size=8).batches())
    assert isinstance(caught.value, ShardCorruptError)
    dataset = StreamingDataset(local=folder, batch_size=8, on_bad_sample="replace")
    assert dataset[6]["meta"] == {"k": 6}
    with pytest.raises(SampleCorruptError, match="column `meta`"):
        dataset[7]


def test_a_bad_sample_is_replaced_by_one_of_the_same_stream(folder: str, tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int", "meta": "json"}, out=tmp_path / "other") as writer:
        for number in range(100, 110):
            writer.write({"id": number, "meta": {"k": number}})
    dataset = StreamingDataset(
        streams=[Stream(local=folder), Stream(local=tmp_path / "other")],
        batch_size=10,
        on_bad_sample="replace",
    )
    seen = [number for batch in dataset.batches() for number in check(batch)]
    assert sorted(seen) == sorted([*map(stand_in, range(COUNT)), *range(100, 110)])


def test_a_line_with_a_value_of_another_type_is_a_bad_sample(tmp_path: Path) -> None:
    with JSONWriter(columns={"id": "int", "text": "str"}, out=str(tmp_path), hashes=None) as writer:
        for number in range(20):
            writer.write({"id": number, "text": f"line {number}"})
    path = tmp_path / "shard.00000.json"
    path.write_bytes(path.read_bytes().replace(b'"line 11"', b'["ne 11"]'))
    with pytest.raises(SampleCorruptError, match=r"sample 11 of shard `shard\.00000\.json`.*on_bad_sample"):
        list(StreamingDataset(local=tmp_path, batch_size=4).batches())
    dataset = StreamingDataset(local=tmp_path, batch_size=4, on_bad_sample="replace")
    seen = [int(number) for batch in dataset.batches() for number in batch["id"]]
    assert seen == [*range(11), 12, *range(12, 20)]


def test_a_corrupt_shard_is_not_a_bad_sample(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path, hashes=["sha1"]) as writer:
        writer.write({"id": 1})
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ShardCorruptError, match="sha1") as caught:
        list(StreamingDataset(local=tmp_path, batch_size=1, on_bad_sample="replace").batches())
    assert not isinstance(caught.value, SampleCorruptError)


def test_a_shard_of_only_bad_samples_raises(tmp_path: Path) -> None:
    with MDSWriter(columns={"meta": "json"}, out=tmp_path, hashes=None) as writer:
        for number in range(3):
            writer.write({"meta": {"k": number}})
    spoil(tmp_path, {0, 1, 2})
    with pytest.raises(SampleCorruptError, match="column `meta`"):
        list(StreamingDataset(local=tmp_path, batch_size=1, on_bad_sample="replace").batches())


@pytest.mark.parametrize(
    ("policy", "message"), [("skip", "batches of different sizes"), ("warn", "'replace'")]
)
def test_other_policies_are_refused(folder: str, policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"`on_bad_sample` is '{policy}'.*{message}"):
        StreamingDataset(local=folder, batch_size=8, on_bad_sample=policy)
