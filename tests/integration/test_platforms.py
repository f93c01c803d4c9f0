"""The plain way of each thing that only Linux has, forced here by hiding what Linux has."""

import ctypes
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hocket.algos.surgery.checks import check_memory
from hocket.ckpt.read.prefetch import _MemoryPool
from hocket.dist.launch import restarts
from hocket.dist.launch.absent_machines import _is_alive
from hocket.dist.launch.warm import starter
from hocket.dist.memory.advice import _peak_of_process
from hocket.dist.ranks import addresses, preflight, rank_command, stack_dump
from hocket.recipes.demo.jobs import Launchers
from hocket.recipes.environment import describe
from hocket.stream.read.epoch_counter import EpochCounter
from hocket.trainer.callbacks.memory_monitor import _resident_bytes
from hocket.trainer.checkpoint import ephemeral
from hocket.trainer.loop.preemption import _is_caught, sparing_workers
from hocket.trainer.ranks.rank_sockets import _host_number, connect_ranks


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process take itself for one on macOS: no `/proc`, no `prctl`, no memory files."""
    read, exists = Path.read_bytes, Path.exists

    def is_hidden(path: Path) -> bool:
        return path.parts[:2] in (("/", "proc"), ("/", "sys"))

    def read_bytes(path: Path) -> bytes:
        if is_hidden(path):
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(Path, "read_text", lambda path, *_, **__: path.read_bytes().decode())
    monkeypatch.setattr(Path, "exists", lambda path: not is_hidden(path) and exists(path))
    monkeypatch.setattr(ctypes, "CDLL", None)
    hidden: tuple[tuple[Any, str], ...] = (
        (os, "memfd_create"),
        (os, "sched_getaffinity"),
        (mmap, "MADV_HUGEPAGE"),
        (signal, "sigtimedwait"),
    )
    for module, name in hidden:
        monkeypatch.delattr(module, name, raising=False)


@pytest.mark.usefixtures("macos")
def test_an_epoch_counter_is_shared_with_forked_workers() -> None:
    counter = EpochCounter(epoch=3)
    if (child := os.fork()) == 0:
        os._exit(0 if counter.join(0, seed=5) == (3, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counter.next_position() == (4, 0)


@pytest.mark.usefixtures("macos")
def test_memory_is_measured_or_said_to_be_unknown() -> None:
    # macOS counts bytes where Linux counts KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert _peak_of_process() == _resident_bytes() == peak
    check_memory(1 << 60, torch.device("cpu"), "the model")
    assert _MemoryPool(4096).take().nbytes == 4096


@pytest.mark.usefixtures("macos")
def test_processes_and_signals_are_found_as_far_as_posix_goes() -> None:
    rank_command.end_with_parent(1)  # no rank is tied to its launcher, and none refuses to run
    assert addresses._starter_process() == os.getppid()
    assert preflight._interface_of("127.0.0.1") == "unknown"
    assert not _is_caught(signal.SIGUSR1)


@pytest.mark.usefixtures("macos")
@pytest.mark.skipif(shutil.which("ps") is None, reason="`ps` is not installed")
def test_the_launcher_knows_whether_a_rank_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank:
        try:
            assert _is_alive(rank.pid)
            rank.send_signal(signal.SIGSTOP)
            os.waitpid(rank.pid, os.WUNTRACED)
            assert stack_dump.process_state(rank.pid) == "T"
        finally:
            rank.kill()
    assert stack_dump.process_state(rank.pid) == ""


@pytest.mark.usefixtures("macos")
def test_ranks_without_realtime_signals_write_no_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stack_dump, "_NUMBER", None)
    stack_dump.write_on_request(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert stack_dump.read_stack(os.getpid(), tmp_path) == ""


@pytest.mark.usefixtures("macos")
def test_loader_workers_are_forked_without_sigtimedwait() -> None:
    with sparing_workers():
        loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_all_processors_are_counted_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert describe()["cpus"] == os.cpu_count()


@pytest.mark.usefixtures("macos")
def test_a_host_without_a_boot_number_is_known_by_its_name() -> None:
    assert _host_number() == _host_number() >= 0


@pytest.mark.usefixtures("macos")
def test_ranks_start_cold() -> None:
    assert starter.fork_server("json") == "the system is not Linux"


class Ranks:
    """Two ranks of the same host, of which this is the first."""

    rank, num_ranks = 0, 2

    def gather(self, number: float) -> list[float]:
        return [number, number - 1]


def test_ranks_without_unix_sockets_exchange_by_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    ranks: Any = Ranks()
    assert connect_ranks(ranks, num_numbers=1, timeout_s=1) is None


@pytest.mark.usefixtures("macos")
def test_the_launchers_of_the_demo_are_new_interpreters(tmp_path: Path) -> None:
    with Launchers() as launchers, (tmp_path / "log").open("wb") as log:
        process = launchers.start(["plan", "--help"], log)
        assert isinstance(process, subprocess.Popen)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.usefixtures("macos")
def test_copies_of_the_state_go_to_a_temporary_folder_of_which_the_free_bytes_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restarts, "_SHARED_MEMORY", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with restarts.memory_folders(Namespace(nnodes="1:1", max_restarts=1)):
        (folder,) = map(Path, ephemeral.memory_folders())
        assert folder.parent == tmp_path
        assert not ephemeral._is_in_memory(folder)
        assert list(ephemeral._free_memory()) == []
        size = os.statvfs(folder)
        assert 0 < ephemeral._free_bytes(folder) <= size.f_blocks * size.f_frsize
    assert not folder.exists()
