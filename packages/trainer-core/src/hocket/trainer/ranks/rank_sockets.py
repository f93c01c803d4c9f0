"""Sockets between the ranks of one host, over which they exchange a few numbers in each step.

An all-reduce of eight numbers wakes up several threads of each rank, which is slow on a host whose cores are
all busy. Here the training thread itself sends the numbers. A rank that receives another rank's numbers one
step later finds them in its socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hocket.trainer.errors import RankFailedError

MAX_RANKS = 8
"""The most ranks that use sockets; with more, an all-reduce takes less time than a send to each rank."""

_SETUP_S = 30.0


class RankRendezvous(Protocol):
    """The blocking exchanges between the ranks that the setup needs."""

    rank: int
    num_ranks: int

    def gather(self, number: float) -> list[float]:
        """Return every rank's number, on every rank."""

    def text_from_rank_0(self, text: str) -> str:
        """Return rank 0's text, on every rank."""


class RankSockets:
    """A gather of a few numbers from all ranks of a host, without another thread.

    Every rank sends the same number of values in each exchange. A later `receive` returns the values of the
    oldest exchange that was not received yet. `connect_ranks` makes instances.

    Args:
        rank: The rank of this process.
        sockets: The sockets to the other ranks, by rank.
        num_numbers: Number of values that a rank sends in an exchange.
        timeout_s: Seconds to wait for another rank's values.
    """

    def __init__(
        self, rank: int, sockets: dict[int, socket.socket], *, num_numbers: int, timeout_s: float
    ) -> None:
        self._rank = rank
        self._sockets = sockets
        self._format = struct.Struct(f"={num_numbers + 1}d")
        self._timeout_s = timeout_s
        self._num_sent = self._num_received = 0
        self._sent: dict[int, bytes] = {}
        for connection in sockets.values():
            connection.setblocking(False)

    def send(self, *numbers: float) -> int:
        """Send this rank's values to all other ranks; return the number of the exchange."""
        self._num_sent += 1
        number = self._num_sent
        self._sent[number] = data = self._format.pack(number, *numbers)
        for rank, connection in self._sockets.items():
            try:
                sent = connection.send(data)
            except (BrokenPipeError, ConnectionResetError, BlockingIOError) as error:
                raise self._lost(rank, "ended before the other ranks did") from error
            if sent != len(data):
                raise self._lost(rank, f"took {sent} of {len(data)} bytes")
        return number

    def receive(self, number: int) -> list[tuple[float, ...]]:
        """Return every rank's values, by rank, in exchange `number`, the oldest that was not received yet.

        Raises:
            RankFailedError: If a rank has ended, exceeds the timeout, or is at another exchange.
        """
        self._num_received += 1
        assert number == self._num_received, "exchanges are received in the order in which they were sent"
        unpack, own_data = self._format.unpack, self._sent.pop(number)
        rows = [own_data] * (len(self._sockets) + 1)
        for rank, connection in self._sockets.items():
            rows[rank] = self._read(rank, connection)
        unpacked = [unpack(row) for row in rows]
        for rank, row in enumerate(unpacked):
            if row[0] != number:
                raise self._lost(rank, f"is at exchange {row[0]:g}, and this rank at {number}")
        return [row[1:] for row in unpacked]

    def _read(self, rank: int, connection: socket.socket) -> bytes:
        data, size, deadline = b"", self._format.size, 0.0
        while len(data) < size:
            try:
                part = connection.recv(size - len(data))
            except BlockingIOError:
                deadline = deadline or time.monotonic() + self._timeout_s
                # `select` takes no descriptor above 1023, and a process with many open files has such.
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise self._lost(rank, f"sent nothing for {self._timeout_s:g} s") from None
                continue
            except ConnectionResetError:
                part = b""
            if not part:
                raise self._lost(rank, "ended before the other ranks did")
            data += part
        return data

    def _lost(self, rank: int, problem: str) -> RankFailedError:
        return RankFailedError(
            f"data-parallel rank {rank} {problem}; its own error, if it had one, says why. Every rank has to "
            "make the same steps"
        )

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        for connection in self._sockets.values():
            connection.close()


def connect_ranks(ranks: RankRendezvous, *, num_numbers: int, timeout_s: float) -> RankSockets | None:
    """Connect the ranks if they are few and on one host; else return None on every rank. Collective.

    Args:
        ranks: The exchanges for the setup.
        num_numbers: Number of values that a rank sends in an exchange.
        timeout_s: Seconds that an exchange may take.
    """
    if not 1 < ranks.num_ranks <= MAX_RANKS or len(set(ranks.gather(_host_number()))) > 1:
        return None
    with contextlib.ExitStack() as exit_stack:
        folder = ""
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                # `mkdtemp` makes the folder private, so that no other user can connect.
                folder = tempfile.mkdtemp(prefix="hocket-")
                exit_stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if not (folder := ranks.text_from_rank_0(folder)):
            return None
        listener = exit_stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(_SETUP_S)
        sockets: dict[int, socket.socket] = {}
        steps: tuple[Callable[[], None], ...] = (
            lambda: _listen(listener, folder, ranks.rank),
            lambda: _connect(listener, folder, ranks, sockets),
        )
        for step in steps:
            is_done = False
            with contextlib.suppress(OSError):
                step()
                is_done = True
            if not all(ranks.gather(float(is_done))):
                for connection in sockets.values():
                    connection.close()
                return None
        return RankSockets(
            ranks.rank, dict(sorted(sockets.items())), num_numbers=num_numbers, timeout_s=timeout_s
        )


def _host_number() -> float:
    """Return a number shared by the processes of one booted host; a negative one without Unix sockets."""
    if not hasattr(socket, "AF_UNIX"):
        return -1.0 - os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return float(int.from_bytes(name.encode()) % (2**53 - 111))


def _listen(listener: socket.socket, folder: str, rank: int) -> None:
    listener.bind(os.path.join(folder, str(rank)))
    listener.listen(MAX_RANKS)


def _connect(
    listener: socket.socket, folder: str, ranks: RankRendezvous, sockets: dict[int, socket.socket]
) -> None:
    """Connect to the lower ranks and accept the higher ranks; each connecting rank first sends its rank."""
    for rank in range(ranks.rank):
        sockets[rank] = connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SETUP_S)
        connection.connect(os.path.join(folder, str(rank)))
        connection.sendall(bytes([ranks.rank]))
    for _ in range(ranks.rank + 1, ranks.num_ranks):
        connection, _ = listener.accept()
        connection.settimeout(_SETUP_S)
        sockets[connection.recv(1)[0]] = connection
