"""Loads in which one rank of each host reads the manifest for all ranks of the host."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed as dist

from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.torch.loading import host_manifest
from support.ranks import run_ranks

MANIFEST = "kind=latency,ms=1,op=GetObject,key=*checkpoint.json.zst"
DATA = "kind=latency,ms=1,op=GetObject,key=*/data/*"


def state(fill):
    # The manifest holds `epoch`, and a data file the tensor.
    return {"w": torch.full((1000, 100), float(fill)), "epoch": fill}


def load(uri, include, hosts):
    """Load on each rank; with `hosts`, ranks are said to be on as many hosts in turn."""
    if hosts > 1:
        host = f"host-{dist.get_rank() % hosts}"
        host_manifest._host = lambda: host
    store = CheckpointStore(uri, timeout_s=60)
    loaded = [store.load("step-3", state(0), include=include) for _ in range(2)]
    store.close()
    return [(float(one.state["w"].sum()), one.state["epoch"]) for one in loaded]


@pytest.fixture
def saved(s3d_faults, monkeypatch):
    server = s3d_faults(MANIFEST, DATA)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    CheckpointStore(server.uri("run")).save(state(3), step=3)
    return server


def test_ranks_of_one_host_make_the_requests_of_one(saved):
    seen = {}
    for world_size in (1, 4):
        saved.set_faults(MANIFEST, DATA)
        saved.reset()
        results = run_ranks(load, world_size, saved.uri("run"), ["epoch"], 1, env=saved.env, init="gloo")
        assert results == [[(0.0, 3)] * 2] * world_size
        seen[world_size] = saved.stats()["requests"]
    assert seen[1] == seen[4], "of all requests"
    assert seen[4]["GetObject"] == 2, "two loads"


def test_a_manifest_is_read_once_a_host_and_data_by_each_rank(saved):
    saved.set_faults(MANIFEST, DATA)
    results = run_ranks(load, 4, saved.uri("run"), None, 2, env=saved.env, init="gloo")
    assert results == [[(300_000.0, 3)] * 2] * 4
    manifest, data = saved.stats()["rules"]
    assert manifest["matched"] == 2 * 2, "two hosts, two loads"
    assert data["matched"] >= 2 * 4, "every rank reads a plain tensor"


def failing(folders):
    """Load checkpoints, most of which cannot be loaded, and return each error's class and message."""
    store, found = CheckpointStore(folders[0], timeout_s=20), []
    for name in folders[1:]:
        source = name[dist.get_rank()] if isinstance(name, list) else name
        try:
            store.load(source, state(0))
            found.append(("", ""))
        except CheckpointError as error:
            found.append((type(error).__name__, str(error)))
    store.close()
    return found


def test_each_rank_raises_the_error_of_a_checkpoint_that_cannot_be_opened(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(state(step), step=step)
    store.close()
    damaged = tmp_path / "step-1" / "checkpoint.json.zst"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "unfinished").mkdir()
    shutil.copytree(tmp_path / "step-2" / "data", tmp_path / "unfinished" / "data")
    (tmp_path / "foreign").mkdir()
    safetensors.numpy.save_file({"w": np.zeros(3)}, tmp_path / "foreign" / "model.safetensors")
    names = ["step-1", "absent", "unfinished", "foreign", ["step-2", "step-3"], "step-3"]
    first, second = run_ranks(failing, 2, [str(tmp_path), *names], init="gloo")
    kinds = ["Corrupt", "NotFound", "Partial", "Incompatible", "NotFound", ""]
    expected = [f"Checkpoint{kind}Error" if kind else "" for kind in kinds]
    assert [kind for kind, _ in first] == [kind for kind, _ in second] == expected
    for found in (first, second):
        assert "different" in found[4][1], "the ranks load different checkpoints"
        for name, (_, message) in zip(names[:4], found[:4], strict=True):
            assert name in message
        assert "on rank" not in "".join(message for _, message in found), "each rank has its own error"


def load_from(folder, places):
    """Load once with each place, which the first rank posts in place of the manifest's own."""
    store = CheckpointStore(folder, timeout_s=20)
    for place in places:
        host_manifest.HostManifest._keep = lambda self, stored, place=place: place
        assert store.load("step-3", state(0)).state["epoch"] == 3
    store.close()


def test_a_rank_that_cannot_take_the_manifest_reads_it_itself(tmp_path):
    CheckpointStore(tmp_path).save(state(3), step=3)
    own = Path("/proc/self").resolve().name
    run_ranks(load_from, 2, str(tmp_path), ["", "1 999999 00", f"{own} 0 00", "0 x ff"], init="gloo")


def count_descriptors(uri):
    """Return the number of open descriptors after each of three loads, and of keys left in the store."""
    store, counts = CheckpointStore(uri, timeout_s=60), []
    for _ in range(3):
        store.load("step-3", state(0))
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    num_keys = store._coordinator.store.num_keys() if dist.get_rank() == 0 else 0
    dist.barrier()
    store.close()
    return counts, num_keys


def test_loads_leave_no_memory_and_no_keys(tmp_path):
    CheckpointStore(tmp_path).save(state(3), step=3)
    results = run_ranks(count_descriptors, 2, str(tmp_path), init="gloo")
    assert all(counts[0] == counts[2] for counts, _ in results), results
    assert results[0][1] <= 1, "the counter of torch's own store"
