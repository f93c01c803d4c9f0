"""Many saves and loads leave no more memory, open files or threads than the first ones."""

import gc
import os
from pathlib import Path

import pytest
import torch

from hocket.ckpt.torch import CheckpointStore
from hocket.ckpt.verbs.retention import KeepLast
from support.sampling import cases

TENSOR_BYTES = 4 << 20


def held():
    """Return resident bytes, open files and threads, including those of Rust."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


@pytest.mark.slow
def test_saves_and_loads_leave_no_memory_files_or_threads(prefix):
    num_saves = cases(full=100, sample=16)
    state = {"w": torch.randn(TENSOR_BYTES // 8), "m": torch.randn(TENSOR_BYTES // 8), "step": 0}
    state |= {f"small.{number}": torch.randn(8) for number in range(100)}
    store = CheckpointStore(prefix, retention=KeepLast(num=2))

    def save(number):
        state["step"] = number
        store.save(state, step=number, mode="async" if number % 2 else "sync").wait(60)
        if number % 4 == 0:
            store.load(f"step-{number}", state)

    for number in range(5):  # the first saves allocate what later ones reuse
        save(number)
    before = held()
    for number in range(5, 5 + num_saves):
        save(number)
    after = held()
    store.close()
    grown = {what: after[what] - before[what] for what in before}
    # Pools may still grow by a few; a leak of each save would grow with their number.
    assert grown["bytes"] < num_saves * TENSOR_BYTES // 4, grown
    assert grown["files"] < num_saves // 2, grown
    assert grown["threads"] < num_saves // 2, grown
