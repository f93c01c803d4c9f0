"""The same on an object store: commit, listing, resharding, faults on the way, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from hocket.ckpt.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointPartialError
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store
from support.ranks import run_ranks

FLAKY = ("kind=slowdown,rate=0.1", "kind=reset,rate=0.1")


def state(fill):
    return {"w": torch.full((1500, 1000), float(fill)), "step": torch.tensor(fill), "loop": {"epoch": fill}}


def test_save_list_load_delete(server):
    store = CheckpointStore(server.uri("ckpt/one"))
    assert store.list() == []
    store.save(state(1), step=1)
    store.save(state(2), step=2, mode="async").wait(60)
    with pytest.raises(CheckpointExistsError, match="step-2"):
        store.save(state(3), step=2)
    assert [(entry.name, entry.status) for entry in store.list()] == [
        ("step-1", "committed"),
        ("step-2", "committed"),
    ]
    loaded = store.load("step-2", state(0))
    assert loaded.state["w"].eq(2).all()
    assert loaded.state["loop"] == {"epoch": 2}
    store.delete(1)
    assert [entry.name for entry in store.list()] == ["step-2"]
    store.close()


def test_a_flipped_byte_and_a_missing_manifest_are_found(server):
    uri = server.uri("ckpt/bad")
    store, files = CheckpointStore(uri), Store(f"{uri}/step-1")
    store.save(state(1), step=1)
    (meta,) = files.list("data/")
    content = bytearray(files.get(meta.key))
    content[-1] ^= 1
    files.put(meta.key, bytes(content))
    with pytest.raises(CheckpointCorruptError, match="`w`"):
        store.load("step-1", state(0))
    files.delete("checkpoint.json.zst")
    with pytest.raises(CheckpointPartialError):
        store.load("step-1", state(0))
    assert [entry.status for entry in store.list()] == ["partial"]


def job(uri):
    rank = dist.get_rank()
    store = CheckpointStore(uri, timeout_s=60)
    for number in (1, 2):
        store.save(state(number), step=number, mode="async", per_rank={"rank": rank})
    store.save(state(3), step=3)
    loaded = store.load("step-2", state(0))
    assert loaded.state["w"].eq(2).all()
    assert loaded.per_rank == {"rank": rank}
    try:
        store.save(state(4), step=3)
    except CheckpointExistsError:
        return len(store.list())
    raise AssertionError("an existing checkpoint was saved over")


def test_two_ranks_save_through_faults_and_one_loads(s3d_faults, monkeypatch):
    server = s3d_faults(*FLAKY, seed=7)
    uri = server.uri("ckpt/two")
    assert run_ranks(job, 2, uri, timeout_s=120, env=server.env, init="gloo") == [3, 3]
    assert sum(server.stats()["faults"].values()) > 0
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    loaded = CheckpointStore(uri).load("step-3", state(0))
    assert loaded.state["w"].eq(3).all()
    assert loaded.per_rank is None
