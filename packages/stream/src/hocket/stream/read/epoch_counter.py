"""The position at which the next iteration starts, shared with the worker processes of a DataLoader."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from hocket.stream.settings.topology import resolve_worker

_MAX_BYTES = 1 << 20
#: Iterations that a late worker can still join.
_NUM_REMEMBERED = 8


@dataclass(slots=True)
class _CounterRecord:
    """The content of the shared file."""

    epoch: int
    """Epoch of the next iteration."""

    batch: int
    """First batch of the next iteration."""

    is_begun: bool = False
    """Whether an iteration has started since the position was last set."""

    joined: list[list[Any]] = field(default_factory=list)
    """Iterations by workers, oldest first: `[seed, worker ids, epoch, batch]`."""


class EpochCounter:
    """A counter that gives each iteration its epoch, in this process and in workers of a torch DataLoader.

    The workers of one iteration all get the same position. torch gives them a common base seed, which
    identifies the iteration. If two iterations have the same seed, a worker that joins for the second time
    joins the later one. The record is an anonymous file with a POSIX lock: forked, spawned and forkserver
    workers share it, and nothing remains of it when the processes end.

    In a process that is not a worker, a forked or unpickled counter is independent of the original.

    Args:
        epoch: Epoch of the next iteration.
        batch: First batch of the next iteration.
    """

    def __init__(self, epoch: int = 0, batch: int = 0) -> None:
        self._attach(_open_anonymous())
        self._write(_CounterRecord(epoch, batch))

    def _attach(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()
        self._close = weakref.finalize(self, os.close, fd)

    def next_position(self) -> tuple[int, int]:
        """Return the (epoch, batch) at which the next iteration starts."""
        record = self._own()
        return record.epoch, record.batch

    @property
    def is_begun(self) -> bool:
        """Whether an iteration has started since the position was last set."""
        return self._own().is_begun

    def set(self, epoch: int, batch: int, *, is_begun: bool = False) -> None:
        """Set the position of the next iteration; workers that have started keep theirs."""
        self._own()
        with self._locked():
            self._write(_CounterRecord(epoch, batch, is_begun, self._read().joined))

    def start(self, epoch: int) -> None:
        """Record that an iteration of `epoch` has started, so that the next one is of the following epoch."""
        self.set(epoch + 1, 0, is_begun=True)

    def join(self, worker: int, seed: int) -> tuple[int, int]:
        """Return the position of a worker's iteration. The first worker of an iteration starts it.

        Args:
            worker: Number of the worker in its DataLoader.
            seed: The base seed that the workers of one iteration have in common.
        """
        with self._locked():
            record = self._read()
            missing = (it for it in reversed(record.joined) if it[0] == seed and worker not in it[1])
            iteration = next(missing, None)
            if iteration is None:
                iteration = [seed, [], record.epoch, record.batch]
                record.joined = [*record.joined[1 - _NUM_REMEMBERED :], iteration]
                record.epoch, record.batch, record.is_begun = record.epoch + 1, 0, True
            iteration[1].append(worker)
            self._write(record)
        return iteration[2], iteration[3]

    def _own(self) -> _CounterRecord:
        """Read the record, in a file that belongs to this process or to its parent's DataLoader."""
        record = self._read()
        if self._owner != os.getpid() and resolve_worker() is None:
            self._attach(_open_anonymous())
            self._write(record)
        return record

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _read(self) -> _CounterRecord:
        return _CounterRecord(**json.loads(os.pread(self._fd, _MAX_BYTES, 0)))

    def _write(self, record: _CounterRecord) -> None:
        # Padded rather than truncated: a process killed here leaves a complete record.
        size = os.fstat(self._fd).st_size
        os.pwrite(self._fd, json.dumps(asdict(record)).encode().ljust(size), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _inherit, (reduction.DupFd(self._fd), os.getpid())
        return EpochCounter, self.next_position()


def _inherit(fd: Any, owner: int) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._attach(fd.detach())
    counter._owner = owner
    return counter


def _open_anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hocket-epoch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
