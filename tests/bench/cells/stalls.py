"""One cell of `tests/bench/ckpt_async.py`: one system saves a state several times while a model trains.

Prints one JSON object. The first save, which allocates memory, is left out. The stall is the time until the
state may change. The script then changes the state, loads the last checkpoint and checks that it has the
earlier values. Steps of a small model run while a save is written, and for the same time after it without a
save. The slowdown is the ratio of their mean times. The jitter is the number of milliseconds by which the
slowest of a hundred steps is late.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from states import SHAPES, State, forget_peak, make_state, num_bytes, peak_kib, sync, warm_memory

Wait = Callable[[], None]
IsDone = Callable[[], bool]
Save = Callable[[State, Path], tuple[IsDone, Wait]]
QUIET_S = 0.5
#: Systems that are limits and not peers, and the figures that they limit.
LIMITS = {"memcpy": ["stall_s", "extra_mib"], "fio": ["slowdown", "jitter_ms"]}


class Trainer:
    """A small model on one thread, whose steps show how much a write slows training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(32, 64)

    def train(self, until: Callable[[], bool]) -> list[float]:
        """Train until `until()` is true; return the seconds of each step."""
        ends = [time.perf_counter()]
        while not until() or len(ends) < 2:
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            ends.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(ends)]


# --- the systems: each makes a function that returns when the state may change -------------------


def saver_hocket(folder: Path) -> Save:
    from hocket.ckpt.torch import CheckpointStore

    store = CheckpointStore(str(folder))

    def save(state: State, path: Path) -> tuple[IsDone, Wait]:
        handle = store.save(state, step=int(path.name), name=path.name, mode="async")
        return handle.done, handle.wait

    return save


def saver_dcp_thread(folder: Path) -> Save:
    """Save with DCP's thread and the default stager of `async_save`."""
    return _dcp(None, is_process=False)


def saver_dcp_stager(folder: Path) -> Save:
    """Save with a stager that keeps its memory, with all options that need no device."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return _dcp(DefaultStager(options), is_process=False)


def saver_dcp_process(folder: Path) -> Save:
    """Save from a process of DCP's own, through shared memory."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # Every tensor is a separate file in shared memory, which stays open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    return _dcp(DefaultStager(options), is_process=True)


def _dcp(stager: Any, *, is_process: bool) -> Save:
    from torch import distributed
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    # Without a process group DCP refuses to save asynchronously.
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD

    def save(state: State, path: Path) -> tuple[IsDone, Wait]:
        writer = checkpoint.FileSystemWriter(path, thread_count=2)
        saved = checkpoint.async_save(
            state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
        )
        if not isinstance(saved, Future):
            saved = saved.upload_completion
        return saved.done, saved.result

    return save


def saver_torch_checkpointing(folder: Path) -> Save:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Direct writes, its default, end with EINVAL on ext4.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(state: State, path: Path) -> tuple[IsDone, Wait]:
        future = manager.save(str(path), {"state": state})
        with manager.lock():  # the state must not change before the lock is free
            pass

        def wait() -> None:
            future.result()
            sync(path)

        return future.done, wait

    return save


def saver_memcpy(folder: Path) -> Save:
    """Copy into allocated memory and write nothing: the limit of a stall."""
    copies: State = {}

    def save(state: State, path: Path) -> tuple[IsDone, Wait]:
        for name, value in state.items():
            if name in copies:
                copies[name].copy_(value)
            else:
                copies[name] = value.clone()
        return (lambda: True), (lambda: None)

    return save


def saver_fio(folder: Path) -> Save:
    """Write as many bytes directly at low priority during the steps: how much the disk itself slows them."""

    def save(state: State, path: Path) -> tuple[IsDone, Wait]:
        command = ["nice", "-n", "10", "fio", "--name=beside", "--rw=write", "--bs=4M", "--direct=1"]
        command += ["--numjobs=2", f"--size={num_bytes(state) // 2}", f"--directory={path}", "--end_fsync=1"]
        path.mkdir(parents=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        return (lambda: process.poll() is not None), (lambda: None if process.wait(120) == 0 else sys.exit(1))

    return save


# --- loading the saved state ---------------------------------------------------------------------


def load_hocket(into: State, path: Path) -> None:
    from hocket.ckpt.torch import load

    load(str(path), into)


def load_dcp(into: State, path: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.load(into, storage_reader=checkpoint.FileSystemReader(path), no_dist=True)


def load_torch_checkpointing(into: State, path: Path) -> None:
    from torch_checkpointing import CheckpointManager

    loaded = CheckpointManager().load(str(path), into={"state": into})
    for name, value in into.items():
        value.copy_(loaded["state"][name])


# --- the cell ------------------------------------------------------------------------------------


def children_kib() -> int:
    """Return the sum of all child processes' peaks, without the memory that they share with this process."""
    total = 0
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            status = Path(f"/proc/{child}/status").read_text()
            total += sum(sign * int(status.partition(key)[2].split()[0]) for key, sign in
                         [("VmHWM:", 1), ("RssShmem:", -1)])  # fmt: skip
    return total


def measure(save: Save, state: State, folder: Path, saves: int) -> dict[str, list[float]]:
    """Save, train meanwhile, and change the state, several times."""
    trainer = Trainer()
    trainer.train(_deadline(QUIET_S))
    figures: dict[str, list[float]] = {"stall_s": [], "durable_s": [], "slowdown": [], "jitter_ms": []}
    for number in range(saves):
        if number > 1:
            shutil.rmtree(folder / str(number - 2), ignore_errors=True)
        start = time.perf_counter()
        is_done, wait = save(state, folder / str(number))
        figures["stall_s"].append(time.perf_counter() - start)
        for value in state.values():
            value.view(-1)[:1] = number
        during = trainer.train(is_done)
        wait()
        figures["durable_s"].append(time.perf_counter() - start)
        quiet = trainer.train(_deadline(max(QUIET_S, figures["durable_s"][-1])))
        figures["slowdown"].append(statistics.mean(during) / statistics.mean(quiet))
        slowest = sorted(during)[len(during) * 99 // 100]
        figures["jitter_ms"].append(1000 * (slowest - statistics.median(quiet)))
    return figures


def _deadline(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def check(system: str, state: State, folder: Path, saves: int) -> None:
    """Load the last checkpoint, and check that it has the state at the time of the save."""
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    globals()[f"load_{system}"](into, folder / str(saves - 1))
    for name, value in state.items():
        value.view(-1)[:1] = saves - 2
        if not torch.equal(value.view(-1)[::17], into[name].view(-1)[::17]):
            raise SystemExit(f"{name} is not what was saved")


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    state = make_state(options.shape)
    save: Save = globals()[f"saver_{options.system}"](options.folder)
    warm_memory()
    forget_peak()
    before = peak_kib()
    figures = measure(save, state, options.folder, options.saves)
    grown = peak_kib() - before + children_kib()
    if options.system not in LIMITS:
        check("dcp" if options.system.startswith("dcp") else options.system, state, options.folder,
              options.saves)  # fmt: skip
    shutil.rmtree(options.folder)
    medians = {name: statistics.median(values[1:]) for name, values in figures.items()}
    report = {**medians, "gb": num_bytes(state) / 1e9, "extra_mib": grown / 1024}
    report = {name: value for name, value in report.items() if name in LIMITS.get(options.system, report)}
    report |= {
        f"{name}_all": [round(value, 4) for value in figures[name]] for name in figures if name in report
    }
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
