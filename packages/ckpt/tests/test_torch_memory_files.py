"""Asynchronous saves into shared memory: each copies the state into the file of the save before the last.

The newest checkpoint is whole whenever a rank dies, and nothing of a half-filled file is read.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hocket.ckpt.errors import CheckpointError  # noqa: E402
from hocket.ckpt.torch import provide  # noqa: E402
from hocket.native import _native  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

SHARED = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory."""
    if not SHARED.is_dir() or os.statvfs(SHARED).f_bavail * os.statvfs(SHARED).f_frsize < 64 << 20:
        pytest.skip("there is no shared memory of 64 MB")
    folder = Path(tempfile.mkdtemp(dir=SHARED, prefix="hocket-test-"))
    yield folder
    shutil.rmtree(folder)


def state(value: float, rows: int = 700) -> dict:
    """Return tensors of several item sizes, one without elements, one that is not contiguous."""
    return {
        "wide": value + torch.arange(rows * 1000.0).reshape(rows, 1000),
        "turned": (value + torch.arange(600.0).reshape(20, 30)).T,
        "half": torch.full((501,), value, dtype=torch.bfloat16),
        "bytes": torch.full((3,), int(value), dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(value, dtype=torch.float64),
        "step": int(value),
    }


def into(rows: int = 700) -> dict:
    found = state(-1.0 if rows else 0, rows) | {"bytes": torch.zeros(3, dtype=torch.uint8)}
    return found | {"turned": torch.zeros(30, 20)}


def open_store(folder: Path):
    return provide(str(folder), timeout_s=30, for_saving=True, per_host=True)


def save(store, value: float, **options):
    given = state(value, options.pop("rows", 700))
    handle = store.save(given, step=int(value), mode="async", **options)
    for tensor in given.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()  # as the next step of a training does
    return handle


def newest(folder: Path, rows: int = 700) -> tuple[int, dict, object]:
    """Return what a new process finds: its step and its state."""
    store = open_store(folder)
    (entry,) = [one for one in store.list() if one.status == "committed"]
    loaded = store.load(entry.name, into(rows))
    store.close()
    return entry.step, loaded.state, loaded.per_rank


def assert_is(found: dict, value: float, rows: int = 700) -> None:
    expected = state(value, rows)
    for name, one in expected.items():
        assert torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one, name


def data_file(folder: Path, step: int) -> os.stat_result:
    (path,) = (folder / f"step-{step}" / "data").iterdir()
    return path.stat()


def test_the_state_may_change_at_once_and_two_files_are_filled_in_turns(memory: Path) -> None:
    store = open_store(memory)
    inodes = []
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        save(store, value).wait(30)
        inodes.append(data_file(memory, int(value)).st_ino)
        assert [one.name for one in store.list()] == [f"step-{int(value)}"], "the newest alone is kept"
    assert inodes == [*inodes[:2], *inodes[:2], inodes[0]]
    held = {
        path.stat().st_ino for path in memory.rglob("*") if path.is_file() and "checkpoint" not in path.name
    }
    assert held == set(inodes)
    store.close()
    step, found, _ = newest(memory)
    assert step == 5
    assert_is(found, 5.0)
    assert [path.name for path in memory.iterdir()] == ["step-5"], "a new store removes what is not named"
    del store


def test_saves_without_a_wait_follow_each_other(memory: Path) -> None:
    store = open_store(memory)
    handles = [save(store, float(value)) for value in range(1, 8)]
    store.close()
    assert all(handle.done() for handle in handles)
    step, found, _ = newest(memory)
    assert step == 7
    assert_is(found, 7.0)


def test_a_state_that_grows_or_shrinks_gets_files_of_its_size(memory: Path) -> None:
    store = open_store(memory)
    for value, rows in ((1.0, 700), (2.0, 900), (3.0, 100), (4.0, 1), (5.0, 900)):
        save(store, value, rows=rows).wait(30)
        size = data_file(memory, int(value)).st_size
        assert rows * 4000 < size < rows * 4000 + 20_000
    store.close()
    step, found, _ = newest(memory, 900)
    assert_is(found, 5.0, 900)
    assert step == 5


def test_large_values_of_a_rank_are_in_the_file(memory: Path) -> None:
    store = open_store(memory)
    for value in (1.0, 2.0, 3.0):
        save(store, value, per_rank={"own": bytes([int(value)]) * 200_000}).wait(30)
    store.close()
    _, found, own = newest(memory)
    assert_is(found, 3.0)
    assert own == {"own": bytes([3]) * 200_000}


def test_synchronous_and_asynchronous_saves_may_alternate(memory: Path) -> None:
    store = open_store(memory)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        if value % 2:
            save(store, value)
        else:
            store.save(state(value), step=int(value))
    store.close()
    step, found, _ = newest(memory)
    assert step == 5
    assert_is(found, 5.0)


def die_while_filling(folder: str, saves: int) -> None:
    """Commit some saves, fill the file of the next one, and end as a killed rank does."""
    store = open_store(Path(folder))
    for value in range(1, saves + 1):
        save(store, float(value)).wait(30)
    part = torch.full((700_000,), 99.0)
    assert store._memory.open()
    store._memory.fill([("wide", "F32", (700, 1000), part.data_ptr(), part.nbytes)], "0" * 32)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_the_newest_checkpoint_stays_whole_if_a_rank_dies_while_it_fills_a_file(
    memory: Path, saves: int
) -> None:
    with pytest.raises(Exception, match=r"SIGKILL|-9|signal 9"):
        run_ranks(die_while_filling, 1, str(memory), saves)
    step, found, _ = newest(memory)
    assert step == saves
    assert_is(found, float(saves))
    assert [path.name for path in memory.iterdir()] == [f"step-{saves}"]


def save_on_ranks(folders: list[str], values: list[float]) -> tuple:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))

    def tree(value: float) -> dict:
        rows = value + torch.arange(48 * 9000.0).reshape(48, 9000)
        return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "whole": value * torch.ones(700, 100)}

    store = open_store(Path(folders[rank]))
    for value in values:
        given = tree(value)
        store.save(given, step=int(value), mode="async")
        given["rows"].to_local().zero_()
        given["whole"].zero_()
    store.close()
    torch.distributed.barrier()
    store = open_store(Path(folders[rank]))
    (entry,) = [one for one in store.list() if one.status == "committed"]
    found, expected = store.load(entry.name, tree(-1.0)).state, tree(values[-1])
    store.close()
    return (
        entry.step,
        torch.equal(found["rows"].to_local(), expected["rows"].to_local()),
        torch.equal(found["whole"], expected["whole"]),
    )


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1], [0, 0, 1]])
def test_ranks_and_their_partners_get_the_bits_of_the_step(memory: Path, hosts: list[int]) -> None:
    folders = [str(memory / f"host{host}") for host in hosts]
    for found in run_ranks(save_on_ranks, len(hosts), folders, [1.0, 2.0, 3.0, 4.0], init="gloo"):
        assert found == (4, True, True)
    if len(set(hosts)) == 2:
        parts = {path.name for path in (memory / "host0").glob("step-4/data/*")}
        assert parts == {path.name for path in (memory / "host1").glob("step-4/data/*")}
        assert len(parts) == len(hosts)


def die_after_a_commit_that_failed(folders: list[str]) -> None:
    """Fail when a host cannot commit what rank 0 has committed, fill the next file, and be killed."""
    rank = torch.distributed.get_rank()
    store = open_store(Path(folders[rank]))
    save(store, 1.0).wait(30)
    if rank == 1:
        store._hosts._commit = fail_for_want_of_room
    with pytest.raises((CheckpointError, OSError), match="No space left"):
        save(store, 2.0).wait(30)
    if rank == 1:
        time.sleep(60)
    part = torch.full((700_000,), 99.0)
    assert store._memory.open()
    store._memory.fill([("wide", "F32", (700, 1000), part.data_ptr(), part.nbytes)], "0" * 32)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_for_want_of_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_a_failed_save_may_have_committed_is_not_filled_again(memory: Path) -> None:
    folders = [str(memory / f"host{host}") for host in range(2)]
    with pytest.raises(Exception, match=r"SIGKILL|-9|signal 9"):
        run_ranks(die_after_a_commit_that_failed, 2, folders, init="gloo")
    step, found, _ = newest(memory / "host0")
    assert step == 2
    assert_is(found, 2.0)


def test_saves_go_on_after_the_folder_was_removed(memory: Path) -> None:
    """As a trainer removes it at the end of a fit, before the next one."""
    store = open_store(memory / "run")
    for value in (1.0, 2.0, 3.0):
        save(store, value).wait(30)
    shutil.rmtree(memory / "run")
    for value in (4.0, 5.0, 6.0):
        save(store, value).wait(30)
    store.close()
    assert [path.name for path in (memory / "run").iterdir()] == ["step-6"], "a closed store has no files"
    step, found, _ = newest(memory / "run")
    assert step == 6
    assert_is(found, 6.0)


def test_two_stores_in_a_process_have_files_of_their_own(memory: Path) -> None:
    first = open_store(memory)
    save(first, 1.0).wait(30)
    second = open_store(memory)
    save(second, 2.0).wait(30)
    del first
    gc.collect()
    for value in (3.0, 4.0):
        save(second, value).wait(30)
    second.close()
    assert_is(newest(memory)[1], 4.0)


def save_in_a_forked_child(folder: str) -> None:
    store = open_store(Path(folder))
    save(store, 1.0).wait(30)
    save(store, 2.0).wait(30)
    given = state(3.0)
    child = os.fork()
    if child == 0:
        store.save(given, step=3, mode="async").wait(30)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    part = torch.full((700_000,), 99.0)
    assert store._memory.open()
    store._memory.fill([("wide", "F32", (700, 1000), part.data_ptr(), part.nbytes)], "0" * 32)


def test_a_forked_child_fills_no_file_of_its_parent(memory: Path) -> None:
    run_ranks(save_in_a_forked_child, 1, str(memory))
    step, found, _ = newest(memory)
    assert step == 3
    assert_is(found, 3.0)


def save_beyond_a_limit(folder: str) -> tuple[str, int]:
    store = open_store(Path(folder))
    save(store, 1.0).wait(30)
    save(store, 2.0).wait(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
    try:
        save(store, 3.0, rows=900).wait(30)
    except OSError as error:
        told = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(store, 4.0).wait(30)
    step = max(one.step for one in store.list() if one.status == "committed")
    store.close()
    return told, step


def test_without_room_a_save_is_refused_and_the_next_one_succeeds(memory: Path) -> None:
    ((told, step),) = run_ranks(save_beyond_a_limit, 1, str(memory))
    assert "reserve" in told
    assert "File too large" in told
    assert step == 4
    assert_is(newest(memory)[1], 4.0)


def test_on_a_disk_an_asynchronous_save_has_a_staging_buffer(tmp_path: Path) -> None:
    if _native.CkptMemoryFile.create(str(tmp_path / "file")) is not None:
        pytest.skip("the temporary folder is in memory")
    assert not (tmp_path / "file").exists()
    store = open_store(tmp_path / "run")
    for value in (1.0, 2.0, 3.0):
        save(store, value)
    store.close()
    assert_is(newest(tmp_path / "run")[1], 3.0)


def test_a_file_in_memory_refuses_what_would_be_wrong(memory: Path) -> None:
    file = _native.CkptMemoryFile.create(str(memory / "file"))
    assert file is not None
    with pytest.raises(OSError, match="File exists"):
        _native.CkptMemoryFile.create(str(memory / "file"))
    with pytest.raises(ValueError, match="is not filled"):
        file.publish(str(memory / "one"), "data/part")
    memory_of = torch.ones(4)
    entry = ("a", "F32", (4,), memory_of.data_ptr(), 16)
    with pytest.raises(ValueError, match="two entries are called `a`"):
        file.fill([entry, entry], {})
    file.fill([entry], {})
    with pytest.raises(ValueError, match="expected a plain path below `data/`"):
        file.publish(str(memory / "one"), "../part")
    path = _native.ckpt_data_path("0" * 32, 0, 0, compressed=False)
    file.publish(str(memory / "one"), path)
    with pytest.raises(ValueError, match="is not filled"):
        file.publish(str(memory / "one"), path)
    file.fill([entry], {})
    with pytest.raises(FileExistsError):
        file.publish(str(memory / "one"), path)
    del file
    assert not (memory / "file").exists()
    assert (memory / "one" / path).is_file()
