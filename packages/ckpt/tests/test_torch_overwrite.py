"""Saves replace a checkpoint only with `overwrite=True`, and at every moment one whole checkpoint exists."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import HashStore
from torch.distributed.checkpoint.api import CheckpointException

import hocket.ckpt
from hocket.ckpt.dcp import HocketReader
from hocket.ckpt.errors import CheckpointExistsError
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.torch.loading import host_manifest
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.native import Store
from support.ranks import run_ranks
from support.sampling import cases


def alone(prefix, **options):
    """Open a store with a coordinator of its own, as another job would."""
    coordinator = Coordinator(HashStore(), rank=0, world_size=1, nonce=os.urandom(16))
    return CheckpointStore(prefix, coordinator=coordinator, **options)


def state(fill):
    return {"w": torch.full((5000,), float(fill)), "epoch": fill}


def data_files(uri):
    return {found.key for found in Store(uri).list("data")}


def named_files(uri):
    return {file["path"] for file in hocket.ckpt.open(uri).manifest.files}


def test_a_save_replaces_a_checkpoint_only_with_overwrite(prefix):
    store = alone(prefix)
    store.save(state(1), step=1, name="last")
    first = named_files(f"{prefix}/last")
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        store.save(state(2), step=2, name="last")
    assert data_files(f"{prefix}/last") == first
    store.save(state(2), step=2, name="last", overwrite=True)
    store.save(state(3), step=3, name="last", mode="async", overwrite=True).wait(60)
    store.save(state(4), step=4, name="fresh", overwrite=True)
    loaded = store.load("last", state(0))
    assert (loaded.step, loaded.state["epoch"]) == (3, 3)
    assert loaded.state["w"].eq(3).all()
    assert data_files(f"{prefix}/last") == named_files(f"{prefix}/last")
    assert not first & data_files(f"{prefix}/last")
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_of_two_concurrent_saves_wins_and_the_other_leaves_no_files(prefix, overwrite):
    trials = cases(full=100, sample=8)
    barrier = threading.Barrier(2, timeout=60)
    stores = [alone(prefix), alone(prefix)]

    def run(writer, name):
        barrier.wait()
        try:
            stores[writer].save(state(writer + 1), step=writer + 1, name=name, overwrite=overwrite)
        except CheckpointExistsError:
            return False
        return True

    old = alone(prefix)
    winners = set()
    with ThreadPoolExecutor(2) as pool:
        for trial in range(trials):
            name = f"trial-{trial}"
            if overwrite:
                old.save(state(9), step=9, name=name)
            won = list(pool.map(run, range(2), [name] * 2))
            uri = f"{prefix}/{name}"
            checkpoint = hocket.ckpt.open(uri)
            step = checkpoint.manifest.step
            # With `overwrite`, a writer that starts after the other's commit replaces it: both succeed.
            assert won[step - 1]
            assert any(won) if overwrite else sum(won) == 1
            assert (checkpoint["w"] == step).all()
            assert data_files(uri) == named_files(uri)
            winners.add(tuple(won))
    if overwrite:
        assert winners - {(True, True)}, "the two saves never overlapped"
    for store in [*stores, old]:
        store.close()


def rank_overwrites(folder):
    store = CheckpointStore(folder, timeout_s=30)
    rank = dist.get_rank()
    weight = torch.arange(1 << 17, dtype=torch.float32)
    store.save({"w": weight}, step=1, name="last")
    store.save({"w": weight + 1}, step=2, name="last", overwrite=True)
    failed = raised(
        lambda: store.save({"w": weight + rank, "loop": rank}, step=3, name="last", overwrite=True)
    )
    loaded = store.load("last", {"w": torch.zeros(1 << 17)}).state["w"]
    meanwhile = replaced_meanwhile(store, folder)
    store.close()
    return failed, torch.equal(loaded, weight + 1), meanwhile


def raised(act):
    try:
        act()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return None


def replaced_meanwhile(store, folder):
    """Return what loads raise on this rank if another job replaces the checkpoint while the ranks read."""
    into = {"w": torch.zeros(1 << 17)}
    told = store._coordinator.store

    def replace():
        job = alone(folder)
        job.save({"w": torch.zeros(1 << 17)}, step=9, name="last", overwrite=True)
        job.close()

    class Reader(HocketReader):
        def read_metadata(self):
            if dist.get_rank() == 1:
                metadata = super().read_metadata()
                dist.barrier()
                return metadata
            dist.barrier()
            replace()
            return super().read_metadata()

    def load(**options):
        key = f"load-{store._num_loads + 1}"
        while dist.get_rank() == 0 and not told.check([f"{key}/report/1"]):
            time.sleep(0.01)
        if dist.get_rank() == 0:  # rank 1 has read its part
            replace()
        store.load("last", into, **options)

    of_one_host = [raised(load), raised(lambda: load(read_once=True))]
    host = f"host-{dist.get_rank()}"
    host_manifest._host = lambda: host
    return [
        *of_one_host,
        raised(load),
        raised(lambda: load(read_once=True)),
        raised(lambda: dcp.load(into, storage_reader=Reader(f"{folder}/last"))),
        raised(lambda: store.load("last", into)),
    ]


def test_two_ranks_replace_their_checkpoint_and_a_failed_save_keeps_it(tmp_path):
    for failed, is_loaded, meanwhile in run_ranks(
        rank_overwrites, 2, str(tmp_path), init="gloo", timeout_s=120
    ):
        assert failed.startswith("CheckpointStateError")
        assert is_loaded
        assert all("replaced" in error for error in meanwhile[:5]), meanwhile
        assert [error.partition(":")[0] for error in meanwhile[:4]] == ["CheckpointNotFoundError"] * 4
        assert meanwhile[5] is None
    assert data_files(str(tmp_path / "last")) == named_files(str(tmp_path / "last"))
