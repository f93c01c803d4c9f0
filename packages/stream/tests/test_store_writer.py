"""Writing to a real object store, with injected faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.native.errors import StoreNotFoundError, StoreTransientError
from hocket.stream import JSONWriter, MDSWriter, StreamingDataset
from hocket.stream.errors import ConfigError, DatasetExistsError
from support.s3d import Server

Faults = Callable[..., Server]
COLUMNS = {"id": "int", "tokens": "ndarray:uint16:512"}


def fill(writer: MDSWriter, first: int, count: int) -> None:
    rng = np.random.default_rng(first)
    for number in range(first, first + count):
        writer.write({"id": number, "tokens": rng.integers(0, 1 << 16, 512, np.uint16)})


def ids(uri: str, local: Any) -> list[int]:
    return [sample["id"] for sample in StreamingDataset(remote=uri, local=local, batch_size=16)]


@pytest.fixture
def server(s3d_faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


def test_shards_upload_concurrently_and_read_back(server: Server, tmp_path: Any) -> None:
    server.set_faults("kind=slowdown,rate=0.2", "kind=lost_reply,rate=0.1,op=PutObject", seed=3, latency_ms=5)
    uri = server.uri("data")
    settings: dict[str, Any] = {"size_limit": 20_000, "compression": "zstd:1", "hashes": ["xxh3_64"]}
    with MDSWriter(columns=COLUMNS, out=uri, max_workers=4, **settings) as writer:
        fill(writer, 0, 200)
    with pytest.raises(DatasetExistsError, match="exist_ok"):
        MDSWriter(columns=COLUMNS, out=uri)
    server.set_faults()
    with MDSWriter(columns=COLUMNS, out=uri, append=True) as writer:
        fill(writer, 200, 30)
    assert ids(uri, tmp_path / "cache") == list(range(230))
    with JSONWriter(
        columns={"id": "int"}, out=(str(tmp_path / "local"), uri), keep_local=True, exist_ok=True
    ) as json_writer:
        json_writer.write({"id": 7})
    assert ids(uri, tmp_path / "cache") == [7]
    held = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    # The store has the new files and none of the old data set's.
    assert {meta.key: Store(uri).get(meta.key) for meta in Store(uri).list()} == held


def test_a_failed_upload_raises_and_leaves_no_data_set(server: Server) -> None:
    server.set_faults("kind=500,rate=1,key=*shard.00002*")
    writer = MDSWriter(columns=COLUMNS, out=server.uri("bad"), size_limit=20_000, max_workers=2, retry=1)
    with pytest.raises(StoreTransientError, match=r"shard\.00002\.mds"), writer:
        fill(writer, 0, 500)
    with pytest.raises(ConfigError, match="finished"):
        fill(writer, 0, 1)
    writer.finish()
    with pytest.raises(StoreNotFoundError):
        Store(server.uri("bad")).get("index.json")


def test_a_failed_append_leaves_the_data_set_unchanged(server: Server, tmp_path: Any) -> None:
    uri = server.uri("more")
    with MDSWriter(columns=COLUMNS, out=uri) as writer:
        fill(writer, 0, 20)
    before = Store(uri).get("index.json")
    server.set_faults("kind=500,rate=1,op=PutObject,key=*shard.00001*")
    writer = MDSWriter(columns=COLUMNS, out=uri, append=True, retry=0)
    with pytest.raises(StoreTransientError), writer:
        fill(writer, 20, 5)
    assert Store(uri).get("index.json") == before
    server.set_faults()
    with MDSWriter(columns=COLUMNS, out=uri, append=True) as writer:
        fill(writer, 20, 5)
    assert ids(uri, tmp_path / "cache") == list(range(25))
    assert len(json.loads(Store(uri).get("index.json"))["shards"]) == 2
