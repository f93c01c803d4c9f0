"""Forks, threads, several users, and many data sets at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset, errors

COUNT = 200
NOBODY = 65534


@pytest.fixture
def remote(s3d: Any, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], tmp_path: Path) -> str:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return write(COUNT, out=s3d.uri(tmp_path.name), size_limit=1000, compression="zstd") and s3d.uri(
        tmp_path.name
    )


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Return a folder that every user may write to."""
    folder = Path(tempfile.mkdtemp(prefix="hocket-users-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def read_ids(**options: Any) -> list[int]:
    dataset = StreamingDataset(batch_size=8, shuffle=True, shuffle_block_size=32, **options)
    return [int(number) for batch in dataset.batches() for number in batch["id"]]


def in_fork(run: Callable[[], object]) -> int:
    """Run a function in a forked child; return the exit code, which is 0 unless it raised."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 200
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("a forked child hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.parametrize("cache_limit", [None, "20kb"])
def test_a_child_forked_during_an_epoch_reads_a_whole_epoch(
    remote: str, tmp_path: Path, cache_limit: str | None
) -> None:
    options: dict[str, Any] = {"remote": remote, "local": tmp_path / "cache", "cache_limit": cache_limit}
    dataset = StreamingDataset(batch_size=8, **options)
    batches = dataset.batches()
    seen = [next(batches)["id"].tolist()]

    def child() -> None:
        with pytest.raises(errors.ConfigError, match="parent of this forked process, where it continues"):
            list(batches)
        # The inherited data set, whose threads exist in the parent only, and a new one.
        again = [batch["id"].tolist() for batch in dataset.batches()]
        assert again == [dataset.sample_ids(number) for number in range(dataset.num_batches)]
        assert sorted(read_ids(**options)) == list(range(COUNT))
        assert in_fork(lambda: read_ids(**options)) == 0

    assert in_fork(child) == 0
    seen += [batch["id"].tolist() for batch in batches]
    assert seen == [dataset.sample_ids(number) for number in range(dataset.num_batches)]


def test_a_writer_raises_in_a_forked_child(tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "data") as writer:
        writer.write({"id": 7})

        def child() -> None:
            with pytest.raises(
                errors.ConfigError, match="forked process: write there, or create a new writer"
            ):
                writer.finish()

        assert in_fork(child) == 0
    assert StreamingDataset(local=tmp_path / "data", batch_size=1)[0] == {"id": 7}


def test_threads_read_concurrently(remote: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"remote": remote, "local": tmp_path / "cache"}
    one = StreamingDataset(batch_size=8, **options)
    with ThreadPoolExecutor(8) as pool:
        wholes = [pool.submit(read_ids, **options) for _ in range(4)]
        # One data set, whose batches are divided over several threads as over a loader's workers.
        turns = [pool.submit(list, one.read_batches(epoch=0, first=k, start=0, stride=3)) for k in range(3)]
        found = pool.submit(lambda: [one[number]["id"] for number in range(0, COUNT, 7)])
        assert len({tuple(whole.result(60)) for whole in wholes}) == 1
        numbered = {batch.number: batch for turn in turns for batch in turn.result(60)}
        assert found.result(60) == list(range(0, COUNT, 7))
    assert [numbered[number].columns["id"].tolist() for number in sorted(numbered)] == [
        list(range(first, first + 8)) for first in range(0, COUNT, 8)
    ]


def read_in_pool(options: dict[str, Any]) -> list[int]:
    return sorted(read_ids(**options))


def test_twenty_data_sets_open_at_once_in_a_pool(remote: str, tmp_path: Path) -> None:
    assert len(read_ids(remote=remote, local=tmp_path / "parents")) == COUNT
    options = {"remote": remote, "local": tmp_path / "cache"}
    with multiprocessing.get_context("fork").Pool(10) as pool:
        done = pool.map_async(read_in_pool, [options] * 20, chunksize=1).get(120)
        pool.close()
        pool.join()
    assert done == [list(range(COUNT))] * 20
    names = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert names == {".json", ".mds"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can switch users")
def test_two_users_of_a_machine_have_separate_default_caches_and_may_share_one(
    remote: str, shared_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def be(user: int, name: str) -> None:
        home = shared_folder / name
        home.mkdir()
        os.environ["HOME"] = str(home)
        os.chown(home, user, user)
        os.setgid(user)
        os.setuid(user)

    def read_as(user: int, name: str) -> None:
        be(user, name)
        assert sorted(read_ids(remote=remote)) == list(range(COUNT))
        assert list((shared_folder / name / ".cache" / "hocket" / "stream").rglob("*.mds"))
        # Both users share this cache: the second one reads the first one's shards.
        assert sorted(read_ids(remote=remote, local=shared_folder / "both")) == list(range(COUNT))

    (shared_folder / "both").mkdir()
    (shared_folder / "both").chmod(0o777)
    assert in_fork(lambda: read_as(0, "one")) == 0
    assert in_fork(lambda: read_as(NOBODY, "two")) == 0
    owners = {path.stat().st_uid for path in (shared_folder / "both").iterdir()}
    assert owners == {0}


def test_reading_uses_neither_torchs_process_group_nor_devices(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    called: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if "/torch/distributed/" in name or "/torch/cuda/" in name:
            called.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        dataset = StreamingDataset(remote=remote, local=tmp_path / "cache", batch_size=8, shuffle=True)
        loader = StreamingDataLoader(dataset)
        batches = [batch["id"] for batch in loader]
        dataset.load_state_dict(loader.state_dict())
    finally:
        sys.setprofile(None)
    assert sum(len(batch) for batch in batches) == COUNT // 2
    # A group that the script has made would be the truth about the ranks, so it is looked for.
    assert called <= {"is_available", "is_initialized", "WORLD", "default_pg"}
    assert not torch.distributed.is_initialized()
    assert not torch.cuda.is_initialized()


ON_DEVICE = """
import sys, torch
from hocket.stream import MDSWriter, StreamingDataLoader, StreamingDataset, errors
assert torch.cuda.is_available()
remote, cache, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
dataset = StreamingDataset(remote=remote, local=cache, batch_size=8, shuffle=True)
loader = StreamingDataLoader(dataset, num_workers=workers, timeout_s=60 if workers else 0)
count = sum(len(batch["id"]) for batch in loader)
print(count, torch.cuda.is_initialized(), torch.cuda.memory_allocated())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_reading_takes_no_device_memory(remote: str, tmp_path: Path, workers: int) -> None:
    # In a new interpreter, where no other test has used the device.
    command = [sys.executable, "-c", ON_DEVICE, remote, str(tmp_path / "cache"), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == (f"{COUNT} False 0\n", 0), done.stderr
