"""Data sets on a hub of Hugging Face, on a local server of its API."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.native.errors import StoreNotFoundError, StorePermissionError, StoreTransientError
from hocket.stream import Stream, StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.read.dataset_index import DatasetIndex
from support.hub import Hub, uri
from support.parquet_files import make_table
from support.ranks import run_ranks

NAME = "datasets/owner/name"
README = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: a/*.parquet
  - split: heldout
    path: b.parquet
- config_name: large
  data_files: [a/*.parquet, b.parquet]
---
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Run a hub without repositories, for a client without a token or a cache."""
    with Hub() as hub:
        for name, value in (hub.clean_env(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        yield hub


def parquet(start: int, count: int) -> bytes:
    """Return a file with rows `start` to `start + count`."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    pq.write_table(make_table(start, count), sink, row_group_size=7)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@pytest.fixture
def data(hub: Hub) -> Hub:
    """Put a data set with two configurations on the hub."""
    files = {"a/0.parquet": parquet(0, 20), "a/1.parquet": parquet(20, 20), "b.parquet": parquet(40, 9)}
    hub.repository(NAME).commit({"README.md": README, **files})
    return hub


def ids(place: str = uri(NAME), **options: Any) -> list[int]:
    dataset = StreamingDataset(remote=place, **({"batch_size": 5} | options))
    return [int(number) for batch in dataset.batches() for number in batch["id"]]


def test_parquet_is_read_by_configuration_and_split(data: Hub) -> None:
    assert ids(config="small", split="train") == list(range(40))
    assert ids(config="small", split="heldout") == list(range(40, 49))
    assert ids(config="small", split="all") == ids(config="large") == list(range(49))
    assert ids(uri(NAME, "a"), split="all") == list(range(40))
    with pytest.raises(ConfigError, match=r"has the configurations \['small', 'large'\]"):
        ids()
    with pytest.raises(ConfigError, match=r"`split` is `test`, .* has the splits \['train', 'heldout'\]"):
        ids(config="small", split="test")


def test_configurations_are_mixed(data: Hub) -> None:
    streams = [
        Stream(remote=uri(NAME), config="small", split=split, name=split) for split in ("train", "heldout")
    ]
    dataset = StreamingDataset(streams=streams, batch_size=7, shuffle=True)
    found = [int(number) for batch in dataset.batches() for number in batch["id"]]
    assert sorted(found) == list(range(49))


def test_mds_is_read_whole_and_by_split(hub: Hub, write: Callable[..., str]) -> None:
    folder = Path(write(60))
    files = {f"train/{path.name}": path.read_bytes() for path in folder.iterdir()}
    hub.repository(NAME).commit(files)
    expected = ids(str(folder), shuffle=True)
    assert ids(split="train", shuffle=True) == ids(uri(NAME, "train"), shuffle=True) == expected
    with pytest.raises(ConfigError, match="has no configurations"):
        ids(split="train", config="x")
    with pytest.raises(ConfigError, match="has no configurations"):
        DatasetIndex(uri(NAME), split="train", config="x")


def test_a_resumed_run_refuses_data_that_has_moved_and_reads_the_commit_it_is_given(
    data: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    repository = data.repository(NAME)
    dataset = StreamingDataset(remote=uri(NAME), config="large", batch_size=5, shuffle=True)
    batches = dataset.batches()
    seen = [int(number) for _ in range(3) for number in next(batches)["id"]]
    state, first = dataset.state_dict(), repository.refs["main"]
    assert f"`@{first}`" in caplog.text
    repository.commit({"b.parquet": parquet(100, 9)})
    seen += [int(number) for batch in batches for number in batch["id"]]
    assert sorted(seen) == list(range(49)), "the commit of the start, to the end of the epoch"
    moved = StreamingDataset(remote=uri(NAME), config="large", batch_size=5, shuffle=True)
    with pytest.raises(StateMismatchError, match=r"`fingerprint` .* \(on a hub, at the commit"):
        moved.load_state_dict(state)
    place = uri(NAME, revision=first)
    resumed = StreamingDataset(remote=place, config="large", batch_size=5, shuffle=True)
    resumed.load_state_dict(state)
    rest = [int(number) for batch in resumed.batches() for number in batch["id"]]
    assert seen[15:] == rest


def test_a_commit_that_changes_no_data_keeps_the_states(data: Hub) -> None:
    dataset = StreamingDataset(remote=uri(NAME), config="large", batch_size=5)
    next(dataset.batches())
    data.repository(NAME).commit({"README.md": README + b"more words\n"})
    later = StreamingDataset(remote=uri(NAME), config="large", batch_size=5)
    later.load_state_dict(dataset.state_dict())
    assert next(later.batches())["id"].tolist() == list(range(5, 10))


def test_another_process_reads_the_same_commit(data: Hub) -> None:
    dataset = StreamingDataset(remote=uri(NAME), config="large", batch_size=5, keep_shards=False)
    pickled = pickle.dumps(dataset)
    data.repository(NAME).commit({"b.parquet": parquet(100, 9)})
    copy = pickle.loads(pickled)
    assert [int(number) for batch in copy.batches() for number in batch["id"]] == list(range(49))


def read_as_rank(place: str, cache: str) -> list[int]:
    rank = int(os.environ["RANK"])
    dataset = StreamingDataset(remote=place, local=f"{cache}/{rank}", config="large", batch_size=5)
    return [int(number) for batch in dataset.batches() for number in batch["id"]]


def test_all_ranks_read_the_commit_of_the_first_one(data: Hub, tmp_path: Path) -> None:
    repository = data.repository(NAME)
    data.after_revision = lambda: repository.commit({"b.parquet": parquet(100 + len(data.seen), 9)})
    found = run_ranks(read_as_rank, 2, uri(NAME), str(tmp_path / "caches"), init="gloo")
    assert sorted(found[0] + found[1])[:40] == list(range(40))
    rest = sorted(found[0] + found[1])[40:]
    assert rest == list(range(rest[0], rest[0] + 9))
    assert len(repository.commits) >= 3, "each rank has found another commit"


def test_each_refusal_is_told_at_the_start(data: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorePermissionError, match="does not exist, or is private"):
        ids(uri("datasets/owner/absent"))
    with pytest.raises(StoreNotFoundError, match="no revision `nowhere`"):
        ids(uri(NAME, revision="nowhere"))
    data.repository(NAME).is_gated = True
    with pytest.raises(StorePermissionError, match="gated; ask for access"):
        ids(config="large")
    data.accepted.add("hf_accepted")
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert ids(config="large") == list(range(49))
    data.limits.append(("/api/", {"Retry-After": "3600"}))
    with pytest.raises(StoreTransientError, match="a pause of 3600 s"):
        ids(config="large")
    with pytest.raises(ConfigError, match=r"`config` is 'large', and `.*` is not on a hub"):
        StreamingDataset(remote="s3://bucket/data", config="large", batch_size=5)


def test_cached_data_of_a_commit_is_read_offline(data: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    place = uri(NAME, revision=data.repository(NAME).refs["main"])
    expected = ids(place, config="small", split="train")
    before = len(data.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ids(place, config="small", split="train") == expected
    assert len(data.seen) == before


def test_the_hubs_conversion_is_read_by_its_folders(
    hub: Hub, call: Callable[..., tuple[object, str, str]]
) -> None:
    files = {f"{config}/train/0000.parquet": parquet(start, 9) for config, start in (("en", 0), ("fr", 50))}
    commit = hub.repository(NAME).commit({".gitattributes": b"", **files}, branch="refs/convert/parquet")
    # A run is resumed by the commit that the first one has told.
    for place in ("hf://datasets/owner/name@refs/convert/parquet", uri(NAME, revision=commit)):
        assert ids(place, config="fr", split="train") == list(range(50, 59))
        with pytest.raises(ConfigError, match=r"\['en', 'fr'\]"):
            ids(place)
        code, printed, failed = call("bench", place, "--config", "fr", "--split", "train", "--json")
        assert code == 0, failed
        assert json.loads(printed)["samples"] == 9


@pytest.mark.parametrize("verb", ["inspect", "verify", "stats", "simulate", "bench"])
def test_the_command_chooses_configuration_and_split(
    data: Hub, call: Callable[..., tuple[object, str, str]], verb: str
) -> None:
    code, printed, failed = call(verb, uri(NAME), "--config", "small", "--split", "train", "--json")
    assert code == 0, failed
    found = json.loads(printed)
    known = {"inspect": ("samples", 40), "bench": ("samples", 40), "verify": ("shards", 6)}
    if verb in known:
        name, count = known[verb]
        assert found[name] == count
    code, _, failed = call(verb, uri(NAME), "--split", "train")
    assert code == 2
    assert "give `--config`, as `small`" in failed
