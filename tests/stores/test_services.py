"""Checkpoints and data sets on other services than S3: committed once, read whole, whatever gets lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

import hocket.ckpt
from hocket.ckpt.errors import CheckpointExistsError
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store
from hocket.stream import MDSWriter, StreamingDataset
from support.s3d import Server
from support.servers import Remote

OTHERS = [pytest.param(name, marks=pytest.mark.stores) for name in ("minio", "azurite")]


@pytest.fixture(params=["gcs", *OTHERS])
def place(request: pytest.FixtureRequest, gcs: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own on each service."""
    server: Server | Remote = request.getfixturevalue(request.param)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server.uri(uuid.uuid4().hex)


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 1000), float(value))}


def save(prefix: str, value: int) -> bool:
    """Whether this writer committed its checkpoint of step 1."""
    with closing(CheckpointStore(prefix)) as store:
        try:
            store.save(state(value), step=1)
        except CheckpointExistsError:
            return False
        return True


def test_of_two_writers_of_a_checkpoint_one_commits(place: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(save, (place, place), (1, 2)))
    assert sorted(won) == [False, True]
    winner = 1 + won.index(True)
    assert (hocket.ckpt.open(f"{place}/step-1")["w"] == winner).all()
    assert [listed.name for listed in hocket.ckpt.list_checkpoints(place)] == ["step-1"]


def test_a_data_set_is_written_and_streamed(place: str, tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int", "x": "bytes"}, out=place, size_limit=4096) as writer:
        for index in range(60):
            writer.write({"id": index, "x": bytes([index]) * 200})
    samples = list(StreamingDataset(remote=place, local=tmp_path / "cache", batch_size=8))
    assert [sample["id"] for sample in samples] == list(range(60))
    assert all(sample["x"] == bytes([sample["id"]]) * 200 for sample in samples)


def test_an_upload_that_fails_leaves_what_was_there(place: str, tmp_path: Path) -> None:
    store = Store(place)
    store.put("k", b"old")
    with pytest.raises(FileNotFoundError):
        store.upload("k", tmp_path / "nothing")
    assert store.get("k") == b"old"


@pytest.mark.parametrize("fault", ["lost_reply", "500", "reset"])
def test_a_lost_answer_to_a_commit_is_settled(
    s3d_faults: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    server = s3d_faults(mode="gcs")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    server.set_faults(f"kind={fault},op=PutObject,key=*/checkpoint.json*,times=1")
    prefix = server.uri("run")
    assert save(prefix, 7)
    assert server.stats()["faults"] == {fault: 1}
    assert (hocket.ckpt.open(f"{prefix}/step-1")["w"] == 7).all()
    assert not save(prefix, 8)


@pytest.mark.stores
def test_what_another_client_wrote_to_gcs_is_read(fake_gcs: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """fake-gcs-server takes writes by the JSON API alone."""
    import urllib.request

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs.env["STORAGE_EMULATOR_HOST"])
    data = bytes(range(256)) * 2000
    url = f"{fake_gcs.endpoint}/upload/storage/v1/b/hocket/o?uploadType=media&name=other/a%2Fk"
    urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST"), timeout=10).close()
    store = Store(fake_gcs.uri("other"), part_bytes=64 << 10)
    assert store.get("a/k") == data
    assert store.get("a/k", start=5, end=300_000) == data[5:300_000]
    assert [(meta.key, meta.size) for meta in store.list()] == [("a/k", len(data))]
    store.delete("a/k")
    assert store.list() == []
