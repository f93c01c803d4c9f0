"""`CheckpointStore` on an object store: commit, listing, deletion, faults, and corrupt checkpoints."""

import pytest
import torch
import torch.distributed as dist

from hocket.ckpt.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointPartialError
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store
from support.ranks import run_ranks
from support.sampling import cases

PUTS = "op=PutObject|CreateMultipartUpload|UploadPart|CompleteMultipartUpload"
MANIFEST = "op=PutObject,key=*checkpoint.json.zst"
FLAKY = (f"kind=conflict,rate=0.2,{PUTS}", "kind=slowdown,rate=0.1", "kind=reset,rate=0.1")
SLOW_RANK = "kind=latency,ms=200,op=PutObject|UploadPart,key=*-r00001-*"
FAULTY_TENTH = tuple(
    f"kind={kind},rate=0.02" for kind in ("slowdown", "500", "reset", "lost_reply", "short_body")
)


def state(fill):
    return {"w": torch.full((1500, 1000), float(fill)), "step": torch.tensor(fill), "loop": {"epoch": fill}}


def test_checkpoints_are_saved_listed_loaded_and_deleted(server):
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


def test_a_flipped_byte_and_a_missing_manifest_raise(server):
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
    server = s3d_faults(*FLAKY, SLOW_RANK, seed=7)
    uri = server.uri("ckpt/two")
    assert run_ranks(job, 2, uri, timeout_s=120, env=server.env, init="gloo") == [3, 3]
    assert server.stats()["faults"].keys() >= {"conflict", "slowdown", "latency"}
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    loaded = CheckpointStore(uri).load("step-3", state(0))
    assert loaded.state["w"].eq(3).all()
    assert loaded.per_rank is None


def tree(num_items):
    return {"w": torch.zeros(num_items), "small": {f"b{number}": torch.zeros(500) for number in range(20)}}


def save_and_load(uri, seed):
    """Save three times under one name, and load all and a part of each save, bit for bit."""
    torch.manual_seed(seed)
    store = CheckpointStore(uri)
    for step, mode in enumerate(("sync", "async", "sync")):
        saved = tree(5 << 20)  # 20 MiB, an upload of three parts
        for tensor in (saved["w"], *saved["small"].values()):
            tensor.normal_()
        store.save(saved, step=step, name="x", mode=mode, overwrite=step > 0).wait(120)
        loaded = store.load("x", tree(5 << 20)).state
        assert torch.equal(loaded["w"], saved["w"])
        assert all(torch.equal(loaded["small"][name], tensor) for name, tensor in saved["small"].items())
        part = store.load("x", {"small": tree(0)["small"]}, include=["small.b1*"]).state["small"]
        assert torch.equal(part["b13"], saved["small"]["b13"])
    assert [entry.step for entry in store.list()] == [2]
    store.close()


def test_conflicting_writes_are_retried(s3d_faults, monkeypatch):
    conflicts = f"kind=conflict,rate=0.5,{MANIFEST}", f"kind=conflict,rate=0.2,{PUTS}"
    server = s3d_faults(*conflicts, seed=2)  # with this seed, every manifest has a conflict
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    save_and_load(server.uri("met"), 0)
    assert [rule["injected"] > 1 for rule in server.stats()["rules"]] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saves_to_a_slow_store_succeed(s3d_faults, monkeypatch):
    # In a full run the reply to the first manifest exceeds a request's timeout, so it is sent again.
    late_ms = cases(full=35_000, sample=300)
    server = s3d_faults(
        f"kind=latency,ms={late_ms},times=1,{MANIFEST}",
        f"kind=latency,ms=50,{PUTS}",
        f"kind=bandwidth,bytes_per_s={48 << 20},op=UploadPart",
    )
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    save_and_load(server.uri("slow"), 0)
    late, slow, narrow = server.stats()["rules"]
    assert late["injected"] == 1
    assert late["matched"] == (3 if late_ms < 30_000 else 4)  # requests for the three saves
    assert slow["injected"] > narrow["injected"] >= 9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tenth_of_faulty_replies_at_most_doubles_the_requests(s3d_faults, monkeypatch):
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    save_and_load(server.uri("first"), 0)  # the first commit of a process probes the store
    server.reset()
    save_and_load(server.uri("ideal"), 0)
    ideal = sum(server.stats()["requests"].values())
    for number in range(cases(full=30, sample=1)):
        server.set_faults(*FAULTY_TENTH, seed=number)
        server.reset()
        save_and_load(server.uri(f"faulty-{number}"), number)
        stats = server.stats()
        asked, spoiled = sum(stats["requests"].values()), sum(stats["faults"].values())
        assert spoiled > 0, stats
        assert ideal < asked <= 2 * ideal, stats
        server.set_faults()
