"""Invalid input raises typed errors that name the value, what was expected and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native.errors import HocketError, StoreConfigError, StorePermissionError
from hocket.stream import MDSWriter, Stream, StreamingDataset, errors, verify


def alter_index(folder: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = Path(folder, "index.json")
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_location_without_an_index_raises(tmp_path: Path) -> None:
    for options in (
        {"local": tmp_path},
        {"remote": tmp_path},
        {"remote": tmp_path, "local": tmp_path / "cache"},
    ):
        with pytest.raises(errors.IndexNotFoundError, match=r"index\.json.*check the location") as caught:
            StreamingDataset(batch_size=1, **options)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=3), "version is 3, expected 2"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="../x.mds"), r"`\.\./x\.mds`.*inside"),
        (lambda index: index["shards"][0].update(samples=-1), "samples|invalid"),
        (lambda index: index["shards"][0].update(column_sizes=[4, None, 16]), "index"),
    ],
)
def test_an_invalid_index_raises(
    write: Callable[..., str], change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = write(5)
    alter_index(folder, change)
    with pytest.raises(errors.IndexCorruptError, match=message):
        StreamingDataset(local=folder, batch_size=1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "arrow", "`arrow`: expected `mds`"),
        ("column_encodings", ["int", "avif", "ndarray:uint16:8"], "`avif` is not supported: expected one of"),
        ("column_encodings", ["int", "pkl", "ndarray:uint16:8"], "allow_unsafe_types"),
    ],
)
def test_unsupported_features_raise_with_the_supported_ones(
    write: Callable[..., str], key: str, value: Any, message: str
) -> None:
    folder = write(5)
    alter_index(folder, lambda index: [shard.update({key: value}) for shard in index["shards"]])
    with pytest.raises(errors.ConfigError, match=message):
        StreamingDataset(local=folder, batch_size=1)


def test_a_truncated_or_altered_shard_raises(write: Callable[..., str]) -> None:
    for name, spoil, message in [
        ("cut", lambda data: data[:-1], r"has \d+ bytes, expected \d+ bytes"),
        ("flipped", lambda data: data[:-1] + bytes([data[-1] ^ 1]), r"has xxh3_64 \w+, expected xxh3_64 \w+"),
    ]:
        path = Path(write(5, name), "shard.00000.mds")
        path.write_bytes(spoil(path.read_bytes()))
        with pytest.raises(errors.ShardCorruptError, match=message) as caught:
            list(StreamingDataset(local=path.parent, batch_size=1))
        assert str(path) in str(caught.value)


def test_a_wrong_sample_count_in_a_shard_without_hashes_raises(write: Callable[..., str]) -> None:
    path = Path(write(5, hashes=None), "shard.00000.mds")
    path.write_bytes((2**31).to_bytes(4, "little") + path.read_bytes()[4:])
    with pytest.raises(errors.ShardCorruptError, match="expected 5 samples"):
        list(StreamingDataset(local=path.parent, batch_size=1))


def test_a_missing_shard_raises(write: Callable[..., str]) -> None:
    path = Path(write(5), "shard.00000.mds")
    path.unlink()
    with pytest.raises(errors.ShardNotFoundError, match=r"`shard\.00000\.mds` was not found at"):
        list(StreamingDataset(local=path.parent, batch_size=1))


def test_a_data_set_without_samples_raises(write: Callable[..., str]) -> None:
    with pytest.raises(errors.ConfigError, match=r"0 samples for 1 data-parallel ranks.*more data"):
        StreamingDataset(local=write(0), batch_size=1)


def test_more_ranks_than_samples_raise(write: Callable[..., str]) -> None:
    folder = write(3)
    for rank in range(4):
        with pytest.raises(errors.ConfigError, match=r"3 samples for 4 data-parallel ranks.*fewer ranks"):
            StreamingDataset(local=folder, global_batch_size=4, rank=rank, world_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 3, "rank": 0, "world_size": 4}, "3 samples for 4 data-parallel ranks"),
        ({"batch_size": 0}, "global batch is 0"),
        ({"batch_size": 8, "num_canonical_nodes": 3}, "divisor"),
        ({"batch_size": 8, "tail": "wrap"}, "`tail` is 'wrap'"),
        ({"batch_size": 100, "tail": "drop"}, "leaves no batch of 20 samples"),
        ({"batch_size": 8, "shuffle_seed": -1}, "`shuffle_seed` is -1"),
        ({"batch_size": 8, "shuffle_block_size": 0}, "`shuffle_block_size` is 0"),
        ({"batch_size": 8, "validate_hash": "sha1"}, r"`sha1`.*\[\"xxh3_64\"\]"),
        ({"batch_size": 8, "validate_hash": "crc"}, "`crc` is not supported"),
        ({"batch_size": 8, "rank": 1}, "both or neither"),
        ({"batch_size": 8, "rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"batch_size": 8, "rank": 0, "world_size": 2, "replication": 2}, "leave `replication` out"),
        ({"batch_size": 8, "replication": 3}, "divisor"),
        ({"batch_size": 8, "split": "/etc"}, "`split`"),
        ({"batch_size": 8.0}, "`batch_size` is 8.0: expected an integer"),
        ({"batch_size": True}, "`batch_size` is True: expected an integer"),
        ({"global_batch_size": "8"}, "`global_batch_size` is '8'"),
        ({"batch_size": 8, "prefetch_bytes": -1}, "`prefetch_bytes` is -1: expected bytes"),
        ({"batch_size": 8, "prefetch_bytes": "256 gigs"}, "`prefetch_bytes` is '256 gigs'"),
        ({"batch_size": 8, "prefetch_batches": 2.5}, "`prefetch_batches` is 2.5"),
        ({"batch_size": 8, "fetch_threads": 0}, "`fetch_threads` is 0"),
        ({"batch_size": 8, "download_timeout": 0}, "`download_timeout` is 0: expected a finite number"),
        ({"batch_size": 8, "download_timeout": "60"}, "`download_timeout` is '60'"),
        ({"batch_size": 8, "download_retry": 0}, "`download_retry` is 0"),
        ({"batch_size": 8, "cache_limit": 0}, "`cache_limit` is 0"),
        ({"batch_size": 8, "shuffle": "no"}, "`shuffle` is 'no': expected True or False"),
        ({"batch_size": 8, "num_canonical_nodes": 2.0}, "`num_canonical_nodes` is 2.0"),
        ({"batch_size": 8, "rank": 0.0, "world_size": 1}, "`rank` is 0.0"),
    ],
)
def test_invalid_arguments_raise(write: Callable[..., str], options: dict[str, Any], message: str) -> None:
    folder = write(20)
    with pytest.raises(errors.ConfigError, match=message):
        StreamingDataset(local=folder, **options)


def test_numpy_numbers_are_accepted_as_arguments(write: Callable[..., str]) -> None:
    dataset = StreamingDataset(
        local=write(20),
        batch_size=np.int64(8),  # type: ignore[arg-type]
        shuffle=np.True_,  # type: ignore[arg-type]
        shuffle_seed=np.uint64(3),  # type: ignore[arg-type]
        num_canonical_nodes=np.int32(2),  # type: ignore[arg-type]
        epoch_size=np.int64(10),  # type: ignore[arg-type]
        cache_limit=np.int64(1 << 30),  # type: ignore[arg-type]
        prefetch_bytes="256mb",
    )
    state = dataset.state_dict()
    assert json.loads(json.dumps(state)) == state
    dataset.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert json.loads(json.dumps(dataset.state_dict()))["epoch"] == 3
    for name, value in [("epoch", 2**64), ("epoch", -1), ("batch", 3), ("batch", 0.0)]:
        with pytest.raises(errors.ConfigError, match=f"`{name}` is {value}"):
            dataset.load_state_dict(state | {name: value})


def test_streams_that_are_no_list_raise(write: Callable[..., str]) -> None:
    one: Any = Stream(local=write(5))
    with pytest.raises(errors.ConfigError, match=r"`streams` is Stream.*expected a list"):
        StreamingDataset(streams=one, batch_size=1)


def test_missing_locations_and_a_uri_as_local_raise() -> None:
    with pytest.raises(errors.ConfigError, match="neither `remote` nor `local`"):
        StreamingDataset(batch_size=1)
    with pytest.raises(errors.ConfigError, match="pass URIs as `remote`"):
        StreamingDataset(local="s3://bucket/data", batch_size=1)


@pytest.mark.parametrize(
    "take",
    [
        lambda place: StreamingDataset(remote=place, batch_size=1),
        lambda place: StreamingDataset(local=place, batch_size=1),
        lambda place: MDSWriter(out=place, columns={"n": "int"}),
        lambda place: verify.verify(str(place)),
    ],
)
def test_a_uri_that_lost_a_slash_and_a_path_that_is_not_utf8_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreConfigError, match=r"has one slash after `s3:`.*`s3://bucket/data`"):
        take(Path("s3://bucket/data"))
    assert list(tmp_path.iterdir()) == []
    not_utf8 = os.fsdecode(os.fsencode(tmp_path) + b"/m\xfc")
    os.mkdir(not_utf8)
    with pytest.raises(errors.ConfigError, match=r"/m\\xfc` is not UTF-8, which paths have to be: rename it"):
        take(Path(not_utf8))


def test_rank_without_world_size_in_the_environment_raises(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(errors.ConfigError, match="`WORLD_SIZE` is not"):
        StreamingDataset(local=write(5), batch_size=1)


def test_missing_credentials_raise_a_permission_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorePermissionError):
        StreamingDataset(remote="s3://bucket/data", local=tmp_path, batch_size=1)


def test_every_error_derives_from_the_root() -> None:
    leaves = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(leaf, HocketError) for leaf in leaves)
