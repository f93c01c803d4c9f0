"""Settings of the whole process while a trainer lives or fits: kernels of torch, and garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_OWN_FROZEN = 1_000
"""Python 3.12 starts with some 375 objects that are frozen; whoever freezes all has more than this many."""

_has_frozen = False
"""Whether a fit of this process has frozen objects."""
_running = 0
"""The fits of this process that run now, one within the other."""


def _freeze_in_fork() -> None:
    if _running:
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_freeze_in_fork)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make torch use only deterministic kernels in the whole process; restore its settings at the end.

    Args:
        device: The device of training. On CUDA, cuDNN's choice of kernels by timing is switched off, and
            cuBLAS gets a fixed workspace, which takes effect unless cuBLAS was used before.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(_WORKSPACE, ":4096:8")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


@contextlib.contextmanager
def collecting_every(interval: int | None) -> Iterator[None]:
    """Freeze existing objects, and with an interval leave collections to the loop; undo both afterwards.

    A full collection takes 0.1 s or more with torch loaded, and happens at a different batch on each rank, so
    that the ranks wait for each other's. Objects that exist at the start are frozen: later collections skip
    them. If objects are frozen already, by the caller, an enclosing fit or the launcher of this rank, nothing
    is frozen or unfrozen here. In a process that is forked meanwhile, as a loader's worker is, all objects
    are frozen, since a collection would copy the memory that it shares.

    A full collection precedes the freeze. Many short fits in one process would spend their time on it, so
    without an interval only the first fit of a process freezes.

    Args:
        interval: Batches between two collections by the loop; None for Python's automatic collections.
    """
    global _has_frozen, _running
    was_enabled = gc.isenabled()
    is_frozen = gc.get_freeze_count() > _OWN_FROZEN
    freezes = not is_frozen and not (_has_frozen and interval is None)
    if freezes:
        gc.collect()  # frozen garbage would stay until the end
        gc.freeze()
        _has_frozen = True
    if interval is not None:
        gc.disable()
    _running += 1
    try:
        yield
    finally:
        _running -= 1
        if freezes:
            gc.unfreeze()
        if interval is not None and was_enabled:
            gc.enable()
