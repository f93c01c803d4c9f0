"""A deadline for the workers of a `DataLoader`, with an error that names the blocked workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data as torch_data

from hocket.trainer.data.worker_seeds import has_persistent_workers, iterate_persistent
from hocket.trainer.errors import DataError


def iterate(loader: Any, timeout_s: float | None, *, epoch: int) -> Iterator[Any]:
    """Return an iterator over an epoch of a loader, with a deadline for each batch of its workers.

    Args:
        loader: A loader; a `DataLoader` with workers and without a `timeout` of its own gets the deadline.
        timeout_s: Seconds; None for no deadline.
        epoch: Number of the epoch, which seeds persistent workers.
    """
    if (
        timeout_s is None
        or not isinstance(loader, torch_data.DataLoader)
        or not loader.num_workers
        or loader.timeout
    ):
        return _iterate(loader, epoch)
    # The iterator copies `timeout` when it is made; the caller's loader keeps its own setting.
    loader.timeout = timeout_s
    try:
        return _iterate(loader, epoch)
    finally:
        loader.timeout = 0


def _iterate(loader: Any, epoch: int) -> Iterator[Any]:
    return iterate_persistent(loader, epoch) if has_persistent_workers(loader) else iter(loader)


def explain(error: RuntimeError, iterator: Any) -> RuntimeError | DataError:
    """Return an error that names the workers if one was late or died; else the error itself."""
    workers = getattr(iterator, "_workers", ())
    message = str(error)
    if not workers or not (
        "timed out after" in message or "exited unexpectedly" in message or "killed by" in message
    ):
        return error
    states = ", ".join(
        f"worker {number} (process {worker.pid}) "
        + ("waits" if worker.is_alive() else f"has ended with status {worker.exitcode}")
        for number, worker in enumerate(workers)
    )
    if "timed out after" in message:
        explanation = (
            f"the data loader yielded no batch for {iterator._timeout:g} s: {states}; look at what its data "
            "set waits for (a lock, a store, a fork of a process with threads)"
        )
    else:
        explanation = f"a worker of the data loader died: {states}; a signal 9 is most often a lack of memory"
    return DataError(f"{explanation}. `DataLoader(timeout=…)` sets another deadline than `dist_timeout`")
