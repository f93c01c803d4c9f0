"""A failure on one rank raises on all ranks, within a deadline, and leaves no checkpoint."""

import gc
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hocket.ckpt.errors import CheckpointTimeoutError
from hocket.ckpt.torch import CheckpointStore, functions, save
from hocket.ckpt.torch.ranks import coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree
from hocket.ckpt.torch.saving.plan import StateSnapshot
from support.ranks import run_ranks


def outcome(act):
    try:
        act()
    except Exception as error:  # noqa: BLE001 - compared by the test
        return type(error).__name__, str(error)
    return None


def without_new_threads(act, *args):
    """Call `act` as during interpreter shutdown, when Python 3.12 and later start no threads."""

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    start, threading.Thread.start = threading.Thread.start, refuse
    try:
        act(*args)
    finally:
        threading.Thread.start = start


def fails_beside_a_late_coordinator(ranks):
    if ranks.rank == 1:
        agree(ranks, "late", KeyError("own"), timeout_s=0.1, what="load")


def meets_a_silent_coordinator():
    """Open a coordinator whose node accepts connections but whose process does not answer."""
    if dist.get_rank() == 1:
        coordinator._CONNECT_S = 0.5
        try:
            coordinator.open_coordinator()
        finally:
            dist.barrier()
        return
    coordinator._opened += 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _get_default_store().set(f"hocket-ckpt/{coordinator._opened}", f"127.0.0.1 {port} {bytes(16).hex()}")
        dist.barrier()


def breaks(snapshot):
    """Raise an error, as may occur while a rank reports its written data."""
    raise KeyError("its report")


def faulty_job(folder):
    rank = dist.get_rank()
    store = CheckpointStore(folder, timeout_s=20)
    endless = CheckpointStore(folder, timeout_s=math.inf)
    weight = torch.arange(1 << 19, dtype=torch.float32)  # 2 MiB: each rank writes half
    found = {}

    def save(name, state=None, mode="sync"):
        found[name] = outcome(
            lambda: store.save({"w": weight} if state is None else state, step=1, name=name, mode=mode).wait(
                20
            )
        )

    # A real limit on one rank: its write fails as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    save("full")
    save("full-async", mode="async")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save("values", {"w": weight, "loop": {"epoch": 1, "lr": 0.1 + rank}})
    save("shapes", {"w": weight[: 1000 + rank]})
    save("keys", {"w": weight, f"bias{rank}": weight[:10]})
    save("object", {"w": weight, "x": object() if rank == 1 else 1})
    with mock.patch.object(StateSnapshot, "values_digest", property(breaks)) if rank == 1 else nullcontext():
        save("report")
    # A wrong argument on one rank raises on all, and later saves are still matched between the ranks.
    found["step"] = outcome(lambda: store.save({"w": weight}, step=-rank, name="step", mode="async").wait(20))
    found["mode"] = outcome(
        lambda: store.save({"w": weight}, step=1, mode="async" if rank == 0 else "?").wait()
    )
    found["name"] = outcome(lambda: store.save({"w": weight}, step=1, name=f"of-{rank}"))
    save("good")
    save("good")
    found["again"] = found.pop("good")
    found["load"] = outcome(lambda: store.load("good", {"w": torch.zeros(1 << 19 if rank == 0 else 7)}))
    found["source"] = outcome(lambda: store.load("good" if rank == 0 else "..", {"w": weight}))
    found["fine"] = outcome(lambda: store.load("good", {"w": torch.zeros(1 << 19)}))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    save("last")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["shutdown"] = outcome(lambda: without_new_threads(save, "shutdown"))
    found["own"] = outcome(lambda: fails_beside_a_late_coordinator(store._coordinator))
    found["silent"] = outcome(meets_a_silent_coordinator)
    if rank == 0:  # rank 1 failed itself, so closing need not wait until it has seen the error
        found["heard"] = store._coordinator.await_ticks(f"{store._save_queue._unseen}/seen", 1, timeout_s=20)
    found["endless"] = outcome(lambda: endless.save({}, step=1, name="endless", mode="async").wait(20))
    endless.close()
    store.close()
    return found


def test_a_failure_on_one_rank_raises_on_all_and_leaves_no_files(tmp_path):
    first, second = run_ranks(faulty_job, 2, str(tmp_path), init="gloo", timeout_s=180)
    assert first["heard"]
    for name in ("full", "full-async", "last"):
        assert first[name][0] == "CheckpointError"
        assert "failed on rank 1" in first[name][1]
        assert second[name][0] == "StoreIOError"
    for found in (first, second):
        assert found["values"][0] == "CheckpointStateError"
        assert "value `loop.lr` is 0.1 on rank 0 and 1.1 on rank 1" in found["values"][1]
        assert "tensor `w` is F32 [1000]" in found["shapes"][1]
        assert "tensor `bias0` is F32 [10]" in found["keys"][1]
        assert "not there on rank 1" in found["keys"][1]
        assert found["object"][0] == "CheckpointStateError"
        assert "`x` is a `builtins.object`" in found["object"][1]
        assert found["again"][0] == "CheckpointExistsError"
        assert found["load"][0] == "CheckpointIncompatibleError"
        assert found["fine"] is None
        assert found["name"][0] == "CheckpointStateError"
        assert f"rank 1: `{tmp_path}/of-1` of step 1" in found["name"][1]
        assert (found["shutdown"], found["endless"]) == (None, None)
    assert first["report"][0] == "CheckpointError"
    assert "failed on rank 1: KeyError: 'its report'" in first["report"][1]
    assert second["report"] == ("KeyError", "'its report'")
    assert second["own"] == ("KeyError", "'own'")
    assert second["silent"][0] == "CheckpointTimeoutError"
    assert "did not answer within 1 s" in second["silent"][1]
    for name in ("step", "mode", "source"):
        assert first[name][0] == "CheckpointError"
        assert "failed on rank 1: ValueError: " in first[name][1]
        assert second[name][0] == "ValueError"
    assert "failed on rank 1" in first["object"][1]
    assert "failed on rank 1" in first["load"][1]
    committed = [path.parent.name for path in tmp_path.glob("*/checkpoint.json.zst")]
    assert sorted(committed) == ["endless", "good", "shutdown"]
    assert {path.parts[-3] for path in tmp_path.glob("*/data/*")} == {"good", "shutdown"}


KILLED = """
import os, signal, sys, time, torch, torch.distributed as dist
from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.torch.saving.job import SaveJob
rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
store = CheckpointStore(f"{folder}/run", timeout_s=3 if rank == 0 else 30)
if rank == 1:  # its bytes are written then, and not reported
    SaveJob.finish = lambda job: os.kill(os.getpid(), signal.SIGKILL)
while rank == 0 and not store._coordinator.store.check(["save-1/report/2"]):
    time.sleep(0.01)  # so that only rank 1 is missing, however late rank 2 comes
began = time.monotonic()
handle = store.save({"w": torch.zeros(3 << 20)}, step=1, mode="async")
try:
    handle.wait(30)
    print("committed")
except Exception as error:
    print(type(error).__name__, error)
print(time.monotonic() - began)
store.close()
sys.stdout.flush()
os._exit(0)  # the group cannot be taken down without rank 1
"""


def test_a_rank_killed_during_a_save_is_named_and_nothing_is_committed(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), "3", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert "CheckpointTimeoutError" in said[rank], said
        assert "rank 1 did not report" in said[rank]
        assert float(said[rank].splitlines()[-1]) < 20  # seconds: the deadline is 3, on a busy machine
    store = CheckpointStore(str(tmp_path / "run"))
    assert "committed" not in {entry.status for entry in store.list()}
    store.save({"w": torch.ones(4)}, step=1)
    assert [entry.status for entry in store.list()] == ["committed"]
    assert torch.equal(store.load("step-1", {"w": torch.zeros(4)}).state["w"], torch.ones(4))


def test_a_refused_save_does_not_free_the_staging_buffer_of_a_running_one(tmp_path):
    store = CheckpointStore(str(tmp_path), timeout_s=0.01)
    gate = threading.Event()
    store._save_queue._worker.submit(lambda: gate.wait(60))  # simulates a slow disk
    first = store.save({"w": torch.full((1000,), 1.0)}, step=1, mode="async")
    with pytest.raises(CheckpointTimeoutError, match="still under way"):
        store.save({"w": torch.full((1000,), 2.0)}, step=2)
    second = store.save({"w": torch.full((1000,), 3.0)}, step=3, mode="async")
    gate.set()
    first.wait(60)
    with pytest.raises(CheckpointTimeoutError, match="still under way"):
        second.wait(60)
    assert store.load("step-1", {"w": torch.zeros(1000)}).state["w"].eq(1).all()
    store.timeout_s = 60
    store.close()


class Interrupting:
    """A value of the state that raises `KeyboardInterrupt` when the save reads it."""

    @property
    def slots_like(self):
        raise KeyboardInterrupt


def test_ctrl_c_during_the_staging_of_a_save_raises_and_ends_the_save(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for mode in ("async", "sync"):
        with pytest.raises(KeyboardInterrupt):
            store.save({"w": Interrupting()}, step=1, mode=mode)
    store.save({"w": torch.zeros(3)}, step=2, mode="async").wait(60)
    assert [entry.step for entry in store.list()] == [2]
    store.close()


LEAVING = """
import sys, torch, torch.distributed as dist
from hocket.ckpt.torch import CheckpointStore
store = CheckpointStore(sys.argv[1], timeout_s=20)
store.save({"w": torch.zeros(1 << 22)}, step=1, mode="async")
raise RuntimeError("the script ends here")
"""


def test_a_process_waits_for_its_save_before_it_exits(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1
    assert "the script ends here" in ended.stderr
    assert [entry.status for entry in CheckpointStore(str(tmp_path)).list()] == ["committed"]


FORKED = """
import os, sys, torch
from hocket.ckpt.torch import CheckpointStore
store = CheckpointStore(sys.argv[1], timeout_s=60)
store.save({"w": torch.zeros(10)}, step=1, mode="async").wait(60)
child = os.fork()
store.save({"w": torch.zeros(10)}, step=2 if child else 3, mode="async")
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_saves_in_its_own_thread_and_waits_for_it(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], timeout=200, check=True)
    assert [entry.step for entry in CheckpointStore(str(tmp_path)).list()] == [1, 2, 3]


def test_garbage_collected_stores_leave_no_thread(tmp_path):
    before = set(threading.enumerate())
    for number in range(3):
        CheckpointStore(f"{tmp_path}/own").save({}, step=number, mode="async").wait(60)
    for number in range(9):
        handle = save({}, f"{tmp_path}/{number}/x", step=0, mode="async")
    handle.wait(60)
    assert len(functions._stores) == functions._MOST_STORES
    functions._stores.clear()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


TERMINATED = """
import sys, time, torch
from hocket.ckpt.torch import CheckpointStore
store = CheckpointStore(sys.argv[1], timeout_s=60)
handle = store.save({"w": torch.zeros(1 << 21)}, step=1, mode="async")
print("under way" if not handle.done() else "done", flush=True)
time.sleep(60)
"""


def test_sigterm_waits_for_the_running_save(s3d_faults, monkeypatch):
    server = s3d_faults(bandwidth=3 << 20)  # slow, so that 8 MiB take seconds
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("run")
    running = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "under way\n"
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=120)
    assert (running.returncode, error) == (-signal.SIGTERM, "")
    store = CheckpointStore(uri)
    assert [entry.status for entry in store.list()] == ["committed"]
    assert torch.equal(store.load("step-1", {"w": torch.ones(1 << 21)}).state["w"], torch.zeros(1 << 21))


@pytest.fixture
def nobodys_sigterm():
    """Set SIGTERM to its default, also if stores of other tests still await garbage collection."""
    gc.collect()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("nobodys_sigterm")
def test_sigterm_is_handled_while_a_store_is_open_unless_another_handler_is_set(tmp_path):
    one, two = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
    for number, store in enumerate((one, two)):
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (number == 0)
        store.save({"w": torch.zeros(3)}, step=number, mode="async").wait(60)
    one.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    two.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        one.save({"w": torch.zeros(3)}, step=3, mode="async").wait(60)
        one.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
