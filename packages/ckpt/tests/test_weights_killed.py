"""Publishers of two ranks, one of which is killed at any point: followers go on from whole versions."""

import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hocket.ckpt import Follower, list_checkpoints
from support.sampling import cases, plan
from support.workers import worker

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("mortal_ranks.py")
NUM_ITEMS, NUM_VERSIONS = 1 << 17, 5


@pytest.fixture(scope="module")
def ranks():
    with worker(sys.executable, str(SCRIPT)) as ask:
        yield ask


def assert_holds(follower):
    """Compare each bit with the state of the step that the follower names."""
    step = follower.step
    expected = {
        "w": torch.arange(NUM_ITEMS, dtype=torch.float32) + step,
        "small": torch.full((3,), step),
    }
    for name, tensor in expected.items():
        assert follower.arrays[name].tobytes() == tensor.numpy().tobytes(), (name, step)


@pytest.fixture(params=["disk", "store"])
def place(request, tmp_path, s3d_faults, monkeypatch):
    """Return a prefix on a disk or in a store, and the variables of the store."""
    if request.param == "disk":
        return str(tmp_path / "weights"), {}, lambda: None
    server = s3d_faults(latency_ms=5)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server.uri("weights"), server.env, server.await_idle


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rank_of_a_publisher_may_be_killed_at_any_point(place, ranks):
    uri, env, await_idle = place
    trials, rng = cases(full=50, sample=2), random.Random(plan().seed)
    request = {"folder": uri, "env": env, "num_items": NUM_ITEMS, "num_versions": NUM_VERSIONS}
    request |= {"stopped": None, "delay_s": 0.0, "mode": "sync"}
    heard, took_s = ranks(request | {"step": 1, "victim": None})
    assert heard == [None, None]
    follower = Follower(uri)
    follower.update()
    assert follower.step == NUM_VERSIONS
    num_killed = 0
    with ThreadPoolExecutor(1) as pool:
        for trial in range(trials):
            first = follower.step + 1  # as a training that resumes from there
            victim, delay_s = rng.randrange(2), rng.uniform(0, 1.1 * took_s)
            mode = rng.choice(("sync", "async"))
            killed = {"step": first, "victim": victim, "delay_s": delay_s, "mode": mode}
            running = pool.submit(ranks, request | killed)
            while not running.done():  # a process that generates meanwhile
                follower.update()
                assert_holds(follower)
            heard, _ = running.result()
            num_killed += heard[victim] == "killed"
            await_idle()
            context = f"trial {trial}: {killed}, {heard}"
            fresh = Follower(uri)
            fresh.update()
            follower.update()
            assert follower.step == fresh.step >= first - 1, context
            for each in (follower, fresh):
                assert_holds(each)
    if trials >= 50:
        assert num_killed >= 0.6 * trials
    heard, _ = ranks(request | {"step": follower.step + 1, "victim": None})
    assert heard == [None, None]
    assert follower.update().step == list_checkpoints(uri)[-1].step
    assert_holds(follower)
    # What killed publishers left of versions that no follower needs is gone.
    assert len(list_checkpoints(uri)) <= 2 * NUM_VERSIONS
    if not env:
        shutil.rmtree(uri)
